"""The session secret, which a peer has to prove before it may send anything else. Pure.

A listener greets with a nonce. The connecting side answers with the session's name, a nonce of its own and a proof
that it knows the session's secret; then the listener proves the same. The secret itself never crosses the data plane:
it is handed out over Dask's control plane, which users already trust with running code.

A parameter server has two secrets: one for its clients, and one for its servers, which may send more kinds of frames to
each other and to the controller. The two secrets have two names.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets

__all__ = ["new_nonce", "new_secret", "of_servers", "proof", "proves"]


def of_servers(name: str) -> str:
    """The name of the secret of the servers of parameter server `name`; no user can choose such a name for another."""
    return f"{name}/servers"


def new_secret() -> str:
    """A fresh session secret, hexadecimal."""
    return secrets.token_hex(32)


def new_nonce() -> str:
    """A number used once, hexadecimal."""
    return secrets.token_hex(16)


def proof(secret: str, side: str, *nonces: str) -> str:
    """A digest of these nonces that only a holder of `secret` can make.

    It depends on `side`, because otherwise a peer could send a proof back as its own.
    """
    return hmac.new(bytes.fromhex(secret), json.dumps((side, *nonces)).encode(), hashlib.sha256).hexdigest()


def proves(claim: object, secret: str, side: str, *nonces: str) -> bool:
    """Whether `claim` is the proof that :func:`proof` makes, compared in constant time."""
    expected = proof(secret, side, *nonces).encode()
    return isinstance(claim, str) and hmac.compare_digest(claim.encode(errors="surrogatepass"), expected)
