"""The handshake, in which both sides prove that they know the session's secret, for every end of a connection. Pure.

A listener greets with a nonce (GREETING). The connecting side answers with the session's name, a nonce of its own and a
proof that it knows the session's secret (HELLO); then the listener proves the same (WELCOME). The secret itself never
crosses the data plane: it is handed out over Dask's control plane, which users already trust with running code.

A parameter server has two secrets: one for its clients, and one for its servers, which may send more kinds of frames to
each other and to the controller. The two secrets have two names.

The classes below do no input and no output. Each takes the frames that its peer has sent, and returns the frame to send
or raises the error that ends the connection. Sockets, event loops, time limits and the simulator are their drivers'.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.rights import STRANGER, TO_ANY, allowed
from dps.errors import AccessDeniedError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = [
    "MAX_ANSWER_BYTES",
    "MAX_HELLO_BYTES",
    "ConnectingHandshake",
    "ListeningHandshake",
    "new_nonce",
    "new_secret",
    "of_servers",
    "proof",
    "proves",
]

# Size of the body that a listener takes before the proof.
MAX_HELLO_BYTES = 1 << 12
# Size of the body that the connecting side takes before the proof, which includes the reason of a refusal.
MAX_ANSWER_BYTES = 1 << 15


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
    return hmac.digest(bytes.fromhex(secret), json.dumps((side, *nonces)).encode(), hashlib.sha256).hex()


def proves(claim: object, secret: str, side: str, *nonces: str) -> bool:
    """Whether `claim` is the proof that :func:`proof` makes, compared in constant time."""
    expected = proof(secret, side, *nonces).encode()
    return isinstance(claim, str) and hmac.compare_digest(claim.encode(errors="surrogatepass"), expected)


class ListeningHandshake:
    """The listening side. Its one attempt ends with the session's name in `session`, or with an error.

    `known` maps names of sessions to secrets.
    """

    def __init__(self, known: Mapping[str, str]):
        self.session: str | None = None  # the name whose secret the peer has proved; None: none yet
        self._known = known
        self._nonce = new_nonce()
        self._tried = False

    def greet(self) -> tuple[Header, bytes]:
        return _frame(frames.GREETING, 0, {"version": frames.VERSION, "nonce": self._nonce})

    def receive(self, header: Header, body: Buffer) -> tuple[Header, bytes]:
        """Take the peer's first frame; the answer is the frame that welcomes it.

        Raises AccessDeniedError if the peer does not know the secret of the session that it names.
        Raises ProtocolError if the frame is no HELLO, or too long, or not the first.
        """
        if self._tried:
            raise ProtocolError("the session secret is to be proved once, in the first frame")
        self._tried = True
        if not allowed(TO_ANY, STRANGER, header.kind, header.flags):
            raise ProtocolError("the first frame must prove the session secret")
        hello = _decoded(header, body, MAX_HELLO_BYTES)
        name, nonce = hello.get("session"), hello.get("nonce")
        if not (isinstance(name, str) and isinstance(nonce, str)):
            name = nonce = ""
        secret = self._known.get(name)
        if secret is None or not proves(hello.get("proof"), secret, "client", self._nonce, nonce):
            raise AccessDeniedError(f"no proof of the secret of parameter server {name!r}")
        self.session = name
        return _frame(frames.WELCOME, header.request, {"proof": proof(secret, "server", nonce, self._nonce)})


class ConnectingHandshake:
    """The connecting side: of a client, and of a server's link to another server or to the controller."""

    def __init__(self, session_name: str, secret: str, what: str):
        self.done = False  # both sides have proved the secret
        self._session = session_name
        self._secret = secret
        self._what = what
        self._nonce, self._peer_nonce = new_nonce(), ""
        self._due: int | None = frames.GREETING  # the kind of the peer's next frame; None: none, the handshake is over

    def receive(self, header: Header, body: Buffer) -> tuple[Header, bytes] | None:
        """Take the peer's next frame; the answer is the frame to send, or None when the peer has proved the secret.

        Raises ProtocolError if the peer is no endpoint of dps, speaks another version, or does not know the secret.
        Raises the DPSError for which the peer refuses this side.
        """
        due, self._due = self._due, None
        if header.kind == frames.ERROR and due is not None:
            raise frames.decode_error(body)
        if header.kind != due:
            raise ProtocolError(f"{self._what} sent a frame of kind {header.kind} in the handshake, not {due}")
        value = _decoded(header, body, MAX_ANSWER_BYTES)
        if due == frames.WELCOME:
            if not proves(value.get("proof"), self._secret, "server", self._nonce, self._peer_nonce):
                raise ProtocolError(f"{self._what} does not know the session secret")
            self.done = True
            return None
        hello = self._answer(value.get("version"), value.get("nonce"))
        self._due = frames.WELCOME
        return _frame(frames.HELLO, 0, hello)

    def _answer(self, version: object, nonce: object) -> dict[str, str]:
        if version is None or not isinstance(nonce, str):
            raise ProtocolError(f"{self._what} does not greet as an endpoint of dps does")
        if version != frames.VERSION:
            raise ProtocolError(f"{self._what} speaks version {version} of the protocol, we {frames.VERSION}")
        self._peer_nonce = nonce
        own_proof = proof(self._secret, "client", nonce, self._nonce)
        return {"session": self._session, "nonce": self._nonce, "proof": own_proof}


def _frame(kind: int, request: int, value: Mapping[str, object]) -> tuple[Header, bytes]:
    body = frames.encode_json(value)
    return Header(kind, request=request, body=len(body)), body


def _decoded(header: Header, body: Buffer, limit: int) -> dict[str, object]:
    """The fields in a body of JSON; none, if it is JSON of another kind."""
    if header.body > limit:
        raise ProtocolError(f"a body of {header.body} bytes in the handshake; at most {limit} are taken")
    value = frames.decode_json(body)
    return value if isinstance(value, dict) else {}
