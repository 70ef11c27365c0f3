"""Check that the control plane lives: sent to a rented machine as source, for any Python 3, without single quotes.

Arguments: fingerprint, the joined.json of the agent, addresses. Exit code 0: one of them has the certificate and its
key. The file belongs to the user that jobs run as: it may name an address, proves nothing.
"""

import hashlib
import json
import os
import socket
import ssl
import sys

fingerprint, joined, *addresses = sys.argv[1:]
try:
    file = os.open(joined, os.O_RDONLY | os.O_NONBLOCK)
    addresses += [json.loads(os.read(file, 65536).decode())["address"]]
except (OSError, ValueError, KeyError, TypeError, RecursionError):  # not joined yet, or damaged by a job
    pass
for address in addresses:
    try:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), 10) as plain:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with context.wrap_socket(plain) as tls:
                if hashlib.sha256(tls.getpeercert(True) or b"").hexdigest() == fingerprint:
                    sys.exit(0)
    except (OSError, ValueError, AttributeError, OverflowError):  # this one does not answer
        pass
sys.exit(1)
