"""GPUs through the real pynvml and ctypes, against a stand-in for NVIDIA's library that the tests compile."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.adapters.probes.gpu_probe import GpuObservation, split_usage
from tests.support.nvml.nvml_machine import GIB, GpuMachine

GPU_IS_LOST, UNKNOWN, NOT_SUPPORTED, NO_PERMISSION, NO_DRIVER = 15, 999, 3, 4, 9
UNINITIALIZED, VERSION_MISMATCH = 1, 18


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[GpuMachine]:
    """A machine with NVIDIA's library and no GPU yet."""
    made = GpuMachine(tmp_path)
    yield made
    made.close()


def test_a_machine_without_a_driver_has_no_gpus_and_says_why(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path, library=False)
    try:
        assert machine.ask("devices") == []
        assert machine.ask("sample", []) == []
        assert machine.ask("problem") == "no NVIDIA driver: libnvidia-ml.so.1 cannot be loaded"
        assert machine.ask("loaded") == [False, False], "pynvml is large: not loaded for nothing"
    finally:
        machine.close()


def test_a_driver_without_a_gpu_says_so(machine: GpuMachine) -> None:
    assert machine.ask("devices") == []
    assert machine.ask("problem") == "the NVIDIA driver sees no GPU"
    machine.has(0)
    machine.ask("skip", 61)
    assert len(machine.ask("devices")) == 1, "one that is put in later is found"
    assert machine.ask("problem") == ""


def test_nvml_is_opened_when_first_asked_and_only_once(machine: GpuMachine) -> None:
    machine.has(0)
    assert machine.ask("loaded") == [False, False]
    assert machine.inits == 0
    for _ in range(3):
        machine.ask("devices")
        machine.ask("sample", [])
    assert machine.inits == 1


def test_devices_are_described(machine: GpuMachine) -> None:
    machine.has(0, 1)
    machine.update({"1.name": "Tésla", "1.mode": 3, "1.total": 24 * GIB, "0.mig": 1})
    plain = {"exclusive": False, "mig": False, "prohibited": False}
    assert machine.ask("devices") == [
        {"index": 0, "uuid": "GPU-0000", "name": "Stand-in 0", "memory_bytes": 16 * GIB, **plain, "mig": True},
        {"index": 1, "uuid": "GPU-0001", "name": "Tésla", "memory_bytes": 24 * GIB, **plain, "exclusive": True},
    ]
    assert machine.ask("problem") == ""


def test_a_name_that_is_no_text_does_not_hide_a_device(machine: GpuMachine) -> None:
    machine.has(0)
    machine["0.name"] = "GeForce \udcff\udcfe"
    assert [gpu["name"] for gpu in machine.ask("devices")] == [""]


def test_devices_are_asked_anew_each_time(machine: GpuMachine) -> None:
    machine.has(0)
    assert not machine.ask("devices")[0]["exclusive"]
    machine["0.mode"] = 3
    assert machine.ask("devices")[0]["exclusive"]
    machine["0.mode"] = 2
    assert machine.ask("devices")[0]["prohibited"]


def test_all_use_is_outside_when_nothing_is_ours(machine: GpuMachine) -> None:
    machine.has(0, 1)
    machine.update({"0.util": 40, "0.used": 3 * GIB, "0.compute": f"100:{2 * GIB}"})
    assert machine.ask("outside", [7]) == [
        {"index": 0, "busy_milli": 400, "memory_bytes": 3 * GIB},
        {"index": 1, "busy_milli": 0, "memory_bytes": 0},
    ]


def test_nothing_is_outside_but_the_drivers_memory_when_all_is_ours(machine: GpuMachine) -> None:
    machine.has(0)
    machine.update({"0.util": 90, "0.used": 3 * GIB, "0.compute": f"100:{2 * GIB} 101:{GIB // 2}"})
    [seen] = machine.ask("sample", [100, 101, 102])
    assert (seen["busy_milli"], seen["outside_busy_milli"]) == (900, 0)
    assert (seen["memory_bytes"], seen["outside_memory_bytes"]) == (3 * GIB, GIB // 2)


def test_a_shared_device_is_divided_by_what_the_driver_says_of_each_process(machine: GpuMachine) -> None:
    machine.has(0)
    machine.update({"0.util": 90, "0.used": 5 * GIB, "0.compute": f"100:{2 * GIB} 200:{3 * GIB}"})
    machine["0.samples"] = "100:9000000:60 200:9000000:30 200:9500000:20 200:2000000:99 300:9500000:80"
    assert machine.ask("outside", [100]) == [{"index": 0, "busy_milli": 250, "memory_bytes": 3 * GIB}]


def test_samples_that_were_never_filled_are_left_aside(machine: GpuMachine) -> None:
    machine.has(0)
    machine.update({"0.util": 90, "0.compute": "100:5 200:5", "0.samples": "100:9:60 200:9:4000000 200:9:10"})
    assert machine.ask("outside", [100])[0]["busy_milli"] == 100


def test_a_shared_device_that_cannot_be_divided_is_the_owners(machine: GpuMachine) -> None:
    machine.has(0)
    machine.update({"0.util": 90, "0.used": 5 * GIB, "0.compute": f"100:{2 * GIB} 200:{3 * GIB}"})
    assert machine.ask("outside", [100])[0]["busy_milli"] == 900
    machine["0.samples"] = "300:9000000:1"  # of nobody who is still there
    assert machine.ask("outside", [100])[0]["busy_milli"] == 900


def test_use_follows_the_machine(machine: GpuMachine) -> None:
    machine.has(0)
    machine.update({"0.util": 50, "0.used": 1000, "0.compute": "100:900"})
    assert machine.ask("outside", [100])[0] == {"index": 0, "busy_milli": 0, "memory_bytes": 100}
    machine.update({"0.util": 70, "0.used": 5000, "0.compute": "100:900 200:4000"})
    assert machine.ask("outside", [100])[0] == {"index": 0, "busy_milli": 700, "memory_bytes": 4100}
    machine.update({"0.util": 0, "0.used": 0, "0.compute": None})
    assert machine.ask("outside", [100])[0] == {"index": 0, "busy_milli": 0, "memory_bytes": 0}


def test_what_draws_counts_and_is_not_counted_twice(machine: GpuMachine) -> None:
    machine.has(0)
    machine.update({"0.util": 30, "0.used": 1000, "0.compute": "100:300", "0.graphics": "100:300 50:600"})
    assert machine.ask("outside", [100])[0] == {"index": 0, "busy_milli": 300, "memory_bytes": 700}
    assert machine.ask("outside", [100, 50])[0] == {"index": 0, "busy_milli": 0, "memory_bytes": 100}


def test_an_old_drivers_calls_are_used_where_the_new_ones_are_missing(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path, flags=("-DOLD_DRIVER",))
    try:
        machine.has(0)
        machine.update({"0.util": 30, "0.used": 1000, "0.compute": "100:300", "0.graphics": "50:600"})
        assert machine.ask("outside", [100, 50])[0] == {"index": 0, "busy_milli": 0, "memory_bytes": 100}
    finally:
        machine.close()


def test_queries_a_device_does_not_support_do_not_hide_it(machine: GpuMachine) -> None:
    machine.has(0)
    for query in ("GetName", "GetComputeMode", "GetUtilizationRates", "GetProcessUtilization"):
        machine[f"fail nvmlDevice{query}"] = NOT_SUPPORTED
    machine["fail nvmlDeviceGetComputeRunningProcesses_v3"] = NO_PERMISSION
    machine["fail nvmlDeviceGetComputeRunningProcesses_v2"] = NO_PERMISSION
    assert [gpu["name"] for gpu in machine.ask("devices")] == [""]
    [seen] = machine.ask("sample", [100])
    assert seen["outside_busy_milli"] == 1000, "somebody may be at work unseen"
    assert seen["measured"]
    assert machine.ask("problem") == ""


def test_without_utilisation_a_device_is_busy_when_something_runs(machine: GpuMachine) -> None:
    machine.has(0)
    machine["fail nvmlDeviceGetUtilizationRates"] = NOT_SUPPORTED
    assert machine.ask("sample", [])[0]["busy_milli"] == 0
    machine["0.compute"] = "100:5"
    assert machine.ask("outside", [])[0]["busy_milli"] == 1000
    assert machine.ask("outside", [100])[0]["busy_milli"] == 0


def test_memory_a_driver_does_not_tell_apart(machine: GpuMachine) -> None:
    machine.has(0)
    machine.update({"0.used": 1000, "0.compute": "100:- 200:300"})
    assert machine.ask("outside", [100])[0]["memory_bytes"] == 300
    assert machine.ask("outside", [200])[0]["memory_bytes"] == 700
    assert machine.ask("outside", [100, 200])[0]["memory_bytes"] == 0
    machine["0.compute"] = "100:- 200:-"
    assert machine.ask("outside", [100])[0]["memory_bytes"] == 1000


def test_a_device_that_falls_off_the_bus_is_full_and_the_others_go_on(machine: GpuMachine) -> None:
    machine.has(0, 1)
    machine["1.util"] = 30
    assert len(machine.ask("devices")) == 2
    machine["fail 0.nvmlDeviceGetMemoryInfo"] = GPU_IS_LOST
    lost, well = machine.ask("sample", [])
    assert lost == {
        "index": 0,
        "busy_milli": 1000,
        "memory_bytes": 16 * GIB,
        "outside_busy_milli": 1000,
        "outside_memory_bytes": 16 * GIB,
        "measured": False,
    }
    assert (well["index"], well["busy_milli"], well["measured"]) == (1, 300, True)
    assert [gpu["index"] for gpu in machine.ask("devices")] == [1]
    assert machine.ask("problem") == "GPU 0: GPU is lost"


def test_a_lost_device_that_comes_back_is_found_within_a_minute(machine: GpuMachine) -> None:
    machine.has(0, 1)
    machine.ask("devices")
    machine["fail 0.nvmlDeviceGetMemoryInfo"] = GPU_IS_LOST
    machine.ask("sample", [])
    machine["fail 0.nvmlDeviceGetMemoryInfo"] = None
    machine.ask("skip", 55)
    assert not machine.ask("sample", [])[0]["measured"]
    assert machine.inits == 1
    machine.ask("skip", 10)
    assert machine.ask("sample", [])[0]["measured"]
    assert machine.inits == 2
    assert machine.ask("problem") == ""


def test_a_device_keeps_its_index_when_one_before_it_is_gone(machine: GpuMachine) -> None:
    machine.has(0, 1)
    machine.ask("devices")
    machine["fail 0.nvmlDeviceGetMemoryInfo"] = GPU_IS_LOST
    machine.ask("sample", [])
    machine["order"] = "1"
    machine.ask("skip", 61)
    assert [(gpu["index"], gpu["uuid"]) for gpu in machine.ask("devices")] == [(1, "GPU-0001")]
    assert [(one["index"], one["measured"]) for one in machine.ask("sample", [])] == [(0, False), (1, True)]
    assert machine.ask("problem") == "GPU 0: GPU is lost"
    machine.has(2, 0, 1)
    machine["fail 0.nvmlDeviceGetMemoryInfo"] = None
    machine.ask("skip", 61)
    found = {gpu["uuid"]: gpu["index"] for gpu in machine.ask("devices")}
    assert found == {"GPU-0000": 0, "GPU-0001": 1, "GPU-0002": 2}


def test_a_device_lost_from_the_start_is_named_by_its_number(machine: GpuMachine) -> None:
    machine.has(0, 1)
    machine["fail 0.nvmlDeviceGetHandleByIndex_v2"] = GPU_IS_LOST
    assert [gpu["index"] for gpu in machine.ask("devices")] == [1]
    assert machine.ask("problem") == "GPU 0: GPU is lost"


@pytest.mark.parametrize("error", [UNINITIALIZED, NO_DRIVER, VERSION_MISMATCH])
def test_a_driver_that_dies_takes_all_devices_until_it_is_back(machine: GpuMachine, error: int) -> None:
    machine.has(0, 1)
    assert len(machine.ask("devices")) == 2
    machine.update({"fail nvmlDeviceGetMemoryInfo": error, "fail nvmlInitWithFlags": error})
    assert [one["measured"] for one in machine.ask("sample", [])] == [False, False]
    assert machine.ask("devices") == []
    assert "NVML" in machine.ask("problem")
    for _ in range(3):
        machine.ask("skip", 61)
        machine.ask("sample", [])
        machine.ask("sample", [])
        machine.ask("devices")
    assert machine.inits == 4, "once a minute"
    machine.update({"fail nvmlDeviceGetMemoryInfo": None, "fail nvmlInitWithFlags": None})
    machine.ask("skip", 61)
    assert [one["measured"] for one in machine.ask("sample", [])] == [True, True]
    assert machine.ask("problem") == ""


def test_a_driver_that_cannot_be_opened_is_tried_again_after_a_minute(machine: GpuMachine) -> None:
    machine.has(0)
    machine["fail nvmlInitWithFlags"] = NO_DRIVER
    assert machine.ask("devices") == []
    assert machine.ask("problem") == "NVML cannot be opened: Driver Not Loaded"
    machine["fail nvmlInitWithFlags"] = None
    assert machine.ask("devices") == []
    assert machine.inits == 1
    machine.ask("skip", 61)
    assert len(machine.ask("devices")) == 1


def test_an_unknown_error_of_one_device_is_that_devices_alone(machine: GpuMachine) -> None:
    machine.has(0, 1)
    machine.ask("devices")
    machine["fail 1.nvmlDeviceGetUtilizationRates"] = UNKNOWN
    assert [one["measured"] for one in machine.ask("sample", [])] == [True, False]
    assert machine.ask("problem") == "GPU 1: Unknown Error"


def test_a_driver_that_hangs_holds_nobody_up(machine: GpuMachine) -> None:
    machine.has(0)
    machine.ask("devices")
    machine["hang nvmlDeviceGetUtilizationRates"] = 3
    machine.ask("in_background")
    seconds, [seen] = machine.ask("timed_sample")
    assert 0.5 < seconds < 2.5
    assert (seen["measured"], seen["outside_busy_milli"]) == (False, 1000)
    assert machine.ask("problem") == "NVML does not answer"
    assert machine.ask("timed_sample")[0] < 0.5, "waited once is enough"


def test_closing_twice_is_not_an_error_and_asking_opens_again(machine: GpuMachine) -> None:
    machine.has(0)
    machine.ask("devices")
    machine.ask("close")
    assert len(machine.ask("devices")) == 1
    assert machine.inits == 2


PIDS = st.integers(1, 6)
HELD = st.dictionaries(PIDS, st.none() | st.integers(0, 500))


@given(
    used=st.integers(0, 1000),
    busy=st.none() | st.integers(0, 1000),
    processes=st.none() | HELD,
    by_pid=st.dictionaries(PIDS, st.integers(0, 1000)),
    own=st.frozensets(PIDS),
)
def test_the_outside_part_is_never_more_than_the_whole(used, busy, processes, by_pid, own) -> None:
    seen = split_usage(0, GpuObservation(used, busy, processes, by_pid), own)
    assert 0 <= seen.outside_busy_milli <= seen.busy_milli <= 1000
    assert 0 <= seen.outside_memory_bytes <= seen.memory_bytes == used
    if not own & set(processes or ()):
        assert (seen.outside_busy_milli, seen.outside_memory_bytes) == (seen.busy_milli, used)
