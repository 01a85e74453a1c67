"""The session secret: who may connect. Pure.

A listener greets with a nonce. The connecting side answers with the session's name, a nonce of its own and a proof
that it knows the session's secret; the listener proves the same back. The secret itself never crosses the data plane;
it is handed out over Dask's control plane, which its users already trust with running code.

A parameter server has two of them: its clients' secret, and that of its servers, who may say more to each other and to
the controller. They go by two names.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets

__all__ = ["new_nonce", "new_secret", "of_servers", "proof", "proves"]


def of_servers(name: str) -> str:
    """The name under which the servers of parameter server `name` prove who they are (no user can choose it)."""
    return f"{name}/servers"


def new_secret() -> str:
    """A fresh session secret, hexadecimal."""
    return secrets.token_hex(32)


def new_nonce() -> str:
    """A number used once, hexadecimal."""
    return secrets.token_hex(16)


def proof(secret: str, side: str, *nonces: str) -> str:
    """What only a holder of `secret` can say of these nonces; `side` keeps a proof from being echoed back."""
    return hmac.new(bytes.fromhex(secret), json.dumps((side, *nonces)).encode(), hashlib.sha256).hexdigest()


def proves(claim: object, secret: str, side: str, *nonces: str) -> bool:
    """Whether `claim` is that proof (compared in constant time)."""
    expected = proof(secret, side, *nonces).encode()
    return isinstance(claim, str) and hmac.compare_digest(claim.encode(errors="surrogatepass"), expected)
