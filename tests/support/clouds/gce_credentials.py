"""A service account for tests, as Google's console hands it out: a file with a private key."""

from __future__ import annotations

import json
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

EMAIL = "worker@test-project.iam.gserviceaccount.com"


def write_service_account(path: Path, token_url: str) -> Path:
    """Write the file of a service account whose tokens are asked for at `token_url`."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    account = {
        "type": "service_account",
        "project_id": "test-project",
        "private_key_id": "key-1",
        "private_key": pem,
        "client_email": EMAIL,
        "client_id": "1",
        "token_uri": token_url,
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(account))
    return path
