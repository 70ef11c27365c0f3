"""Settings of providers: accepted keys, defaults, and the limits of a file that was only found."""

from __future__ import annotations

import pytest

from distributed_grid.config import ClusterConfig, ConfigProblems
from distributed_grid.config.providers import AwsSettings, DockerLocalSettings


def docker(text: str) -> DockerLocalSettings:
    found = ClusterConfig.from_text(f"providers: {{docker_local: {text}}}").provider("docker_local", {})
    assert isinstance(found, DockerLocalSettings)
    return found


def test_docker_local_needs_no_key():
    found = docker("{}")
    assert (found.image, found.network) == ("grid-worker:latest", "host")
    assert found.endpoint_url == "unix:///var/run/docker.sock"
    assert (found.cpu_limit_milli, found.memory_limit_bytes, found.price_per_hour) == (None, None, {})


def test_docker_local_reads_every_key():
    found = docker(
        "{image: 'reg.example:5000/team/worker:v1.2', cpu_limit: 1.5, memory_limit: 512m, network: my-net, "
        "endpoint_url: 'unix:///run/user/1000/docker.sock', price_per_hour: {cpu: 0.02}}"
    )
    assert (found.image, found.network) == ("reg.example:5000/team/worker:v1.2", "my-net")
    assert (found.cpu_limit_milli, found.memory_limit_bytes) == (1500, 512 << 20)
    assert found.endpoint_url == "unix:///run/user/1000/docker.sock"
    assert found.price_per_hour == {"cpu": 0.02}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{image: 'Not An Image'}", "the name of an image, such as grid-worker:latest"),
        ("{network: 'a network'}", "host, bridge or the name of a network"),
        ("{endpoint_url: 'tcp://192.0.2.1:2375'}", "the Unix socket of a Docker engine"),
        ("{cpu_limit: 0}", "more than 0"),
        ("{cpu_limit: -1}", "more than 0"),
        ("{memory_limit: 16}", "such as 16g"),
        ("{price_per_hour: {cpu: -1}}", "a price per hour, 0 or more"),
        ("{imgae: x}", "unknown key; did you mean 'image'?"),
    ],
)
def test_wrong_values_of_docker_local_are_named_with_what_is_expected(text, problem):
    with pytest.raises(ConfigProblems) as caught:
        ClusterConfig.from_text(f"providers: {{docker_local: {text}}}")
    assert problem in str(caught.value)


def test_a_file_that_was_only_found_starts_no_workers():
    named = ClusterConfig.from_text("scaling: {provider: docker_local}\nproviders: {docker_local: {}}")
    found, inert = named.without_acts()
    assert found.providers == {}
    assert found.scaling.provider is None
    assert set(inert) == {"providers", "scaling.provider"}


def aws(text: str) -> AwsSettings:
    found = ClusterConfig.from_text(f"providers: {{aws: {text}}}").provider("aws", {})
    assert isinstance(found, AwsSettings)
    return found


def test_a_kind_of_worker_has_one_instance_type_or_several_in_order():
    found = aws("{region: us-west-2, instance_types: {gpu: g4dn.xlarge, cpu: [c6i.xlarge, c5.xlarge]}}")
    assert (found.types_of("gpu"), found.types_of("cpu")) == (("g4dn.xlarge",), ("c6i.xlarge", "c5.xlarge"))
    assert list(found.instance_types) == ["gpu", "cpu"]


def test_aws_needs_a_region_and_nothing_else():
    found = aws("{region: us-west-2}")
    assert (found.zones, found.subnet_ids, found.spot_max_price, found.associate_public_ip) == ((), (), {}, None)
    assert not found.spot_instance_enabled


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{region: 'us west'}", "a region such as us-west-2"),
        ("{region: a, instance_types: {cpu: []}}", "one or more instance types"),
        ("{region: a, instance_types: {cpu: c5/xlarge}}", "an instance type such as c5.xlarge"),
        ("{region: a, instance_types: {cpu: [c5.xlarge, 5]}}", "an instance type such as c5.xlarge"),
        ("{region: a, zones: us-west-2a}", "a list of availability zones"),
        ("{region: a, disk_gb: 0}", "a whole number of GB"),
        ("{region: a, endpoint_url: 'ftp://x'}", "an address that starts with https://"),
        ("{region: a, endpoint_url: 'https://user:word@x'}", "an address that starts with https://"),
        ("{region: a, endpoint_url: 'http://10.0.0.1:80'}", "or with http:// on this machine"),
        ("{region: a, endpoint_url: 'http://127.0.0.1.evil.example'}", "or with http:// on this machine"),
        ("{region: a, spot_max_price: {cpu: -1}}", "a price per hour, 0 or more"),
    ],
)
def test_wrong_values_of_aws_are_named_with_what_is_expected(text, problem):
    with pytest.raises(ConfigProblems) as caught:
        ClusterConfig.from_text(f"providers: {{aws: {text}}}")
    assert problem in str(caught.value)
