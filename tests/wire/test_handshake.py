"""The handshake as values: each side against the other, and both against an adversary that knows no secret.

The oracle of the adversary's test is the rule of matching conversations: a side believes its peer only if another side
that knows the secret has made the proof for exactly these two nonces, and only one side believes each proof.
"""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

from dps.engine.wire import frames, handshake
from dps.engine.wire.frames import Header
from dps.engine.wire.handshake import (
    MAX_ANSWER_BYTES,
    MAX_HELLO_BYTES,
    ConnectingHandshake,
    ListeningHandshake,
    new_secret,
)
from dps.errors import AccessDeniedError, ClockTimeoutError, DPSError, ProtocolError

NAME, SECRET = "s", "ab" * 32
KNOWN = {NAME: SECRET, f"{NAME}/servers": "cd" * 32}
names = st.text(st.characters(), max_size=20)


def caller(secret: str = SECRET, name: str = NAME) -> ConnectingHandshake:
    return ConnectingHandshake(name, secret, "the peer")


def framed(kind: int, value: object, request: int = 0) -> tuple[Header, bytes]:
    body = frames.encode_json(value)
    return Header(kind, request=request, body=len(body)), body


def content(frame: tuple[Header, bytes]) -> dict:
    return frames.decode_json(frame[1])


# ---- each side against the other ------------------------------------------------------------------------------------


@given(names, st.integers(0, 2**32 - 1))
def test_both_sides_know_the_secret(name: str, request: int) -> None:
    secret = new_secret()
    listening, connecting = ListeningHandshake({**KNOWN, name: secret}), caller(secret, name)
    greeting = listening.greet()
    hello = connecting.receive(*greeting)
    assert (listening.session, connecting.done) == (None, False)
    welcome = listening.receive(hello[0]._replace(request=request), hello[1])
    assert (listening.session, connecting.done) == (name, False)
    assert connecting.receive(*welcome) is None
    assert connecting.done
    assert [f[0].kind for f in (greeting, hello, welcome)] == [frames.GREETING, frames.HELLO, frames.WELCOME]
    assert [f[0].body for f in (greeting, hello, welcome)] == [len(f[1]) for f in (greeting, hello, welcome)]
    assert welcome[0].request == request, "a client finds its answer by the number"
    assert content(greeting)["version"] == frames.VERSION
    sent = b"".join(f[1] for f in (greeting, hello, welcome))
    assert secret.encode() not in sent


@given(names, names, st.booleans())
def test_a_listener_refuses_a_wrong_secret_and_a_wrong_name(name: str, other: str, wrong_name: bool) -> None:
    listening = ListeningHandshake({name: SECRET})
    wrong_name = wrong_name and name != other
    connecting = caller(SECRET if wrong_name else "cd" * 32, other if wrong_name else name)
    with pytest.raises(AccessDeniedError, match="no proof of the secret"):
        listening.receive(*connecting.receive(*listening.greet()))
    assert listening.session is None


def test_a_session_does_not_open_another() -> None:
    """The servers' secret under the name of the clients, and the other way round."""
    for name, secret in zip(KNOWN, reversed(KNOWN.values()), strict=True):
        listening = ListeningHandshake(KNOWN)
        with pytest.raises(AccessDeniedError):
            listening.receive(*caller(secret, name).receive(*listening.greet()))


@given(st.one_of(st.integers(), st.text(max_size=3), st.none(), st.lists(st.integers(), max_size=2)))
def test_another_version_is_refused_with_both_numbers(version) -> None:
    greeting = framed(frames.GREETING, {"version": version, "nonce": "00"})
    connecting = caller()
    if version == frames.VERSION:
        assert connecting.receive(*greeting) is not None
        return
    words = "does not greet" if version is None else f"(?s)speaks version .* of the protocol, we {frames.VERSION}"
    with pytest.raises(ProtocolError, match=words):
        connecting.receive(*greeting)
    with pytest.raises(ProtocolError):  # nor does it go on after that
        connecting.receive(*ListeningHandshake(KNOWN).greet())


def test_the_reason_of_a_refusal_is_passed_on() -> None:
    refusal = frames.encode_error(ClockTimeoutError("slow"))
    error = Header(frames.ERROR, body=len(refusal)), refusal
    for greeted in (False, True):
        connecting = caller()
        if greeted:
            connecting.receive(*ListeningHandshake(KNOWN).greet())
        with pytest.raises(ClockTimeoutError, match="slow"):
            connecting.receive(*error)
        with pytest.raises(ProtocolError):
            connecting.receive(*ListeningHandshake(KNOWN).greet())
        assert not connecting.done


# ---- frames that were changed on their way --------------------------------------------------------------------------


def decoded(body: bytes) -> dict:
    """What a changed body says; {} if it is no JSON of an object. An oracle of its own."""
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


@given(st.sampled_from([0, 1, 2]), st.data())
def test_a_changed_or_truncated_frame_changes_nothing_or_ends_it(which: int, data) -> None:
    """The handshake succeeds if, and only if, each side reads in it what the other one wrote."""
    listening, connecting = ListeningHandshake(KNOWN), caller()
    same = True
    try:
        frame = listening.greet()
        for number in range(3):
            if number == which:
                header, body = frame
                place = data.draw(st.integers(0, len(body)))
                cut = data.draw(st.booleans())
                changed = body[:place] if cut else body[:place] + data.draw(st.binary(max_size=2)) + body[place + 1 :]
                same = decoded(changed) == decoded(body)
                frame = header._replace(body=len(changed)), changed
            frame = connecting.receive(*frame) if number != 1 else listening.receive(*frame)
    except DPSError:
        pass
    assert connecting.done == same
    assert (listening.session == NAME) == (same or which == 2)


LONG = [(frames.GREETING, MAX_ANSWER_BYTES), (frames.HELLO, MAX_HELLO_BYTES), (frames.WELCOME, MAX_ANSWER_BYTES)]


@pytest.mark.parametrize(("kind", "limit"), LONG)
@pytest.mark.parametrize("excess", [0, 8])
def test_bodies_have_a_limit(kind: int, limit: int, excess: int) -> None:
    listening, connecting = ListeningHandshake(KNOWN), caller()
    frame = listening.greet()
    while frame is not None:
        header, body = frame
        if header.kind == kind:
            body = body.ljust(limit + excess)
            header = header._replace(body=len(body))
        receiver = listening if header.kind == frames.HELLO else connecting
        if header.kind == kind and excess:
            with pytest.raises(ProtocolError, match=f"at most {limit} are taken"):
                receiver.receive(header, body)
            assert not connecting.done
            return
        frame = receiver.receive(header, body)
    assert connecting.done


@pytest.mark.parametrize("kind", [k for k in range(256) if k != frames.HELLO])
def test_a_listener_takes_no_other_kind(kind: int) -> None:
    listening = ListeningHandshake(KNOWN)
    _, body = caller().receive(*listening.greet())
    with pytest.raises(ProtocolError, match="the first frame must prove"):
        listening.receive(Header(kind, body=len(body)), body)
    assert listening.session is None


def test_each_side_takes_a_frame_once() -> None:
    listening, connecting = ListeningHandshake(KNOWN), caller()
    greeting = listening.greet()
    hello = connecting.receive(*greeting)
    welcome = listening.receive(*hello)
    with pytest.raises(ProtocolError, match="once"):
        listening.receive(*hello)
    connecting.receive(*welcome)
    for again in (greeting, welcome):
        with pytest.raises(ProtocolError, match="in the handshake"):
            connecting.receive(*again)


def test_a_listener_allows_one_attempt() -> None:
    """Otherwise a stranger could try proof after proof on one connection."""
    listening = ListeningHandshake(KNOWN)
    hello = caller().receive(*listening.greet())
    with pytest.raises(AccessDeniedError):
        listening.receive(*framed(frames.HELLO, {**content(hello), "proof": "00" * 32}))
    with pytest.raises(ProtocolError, match="once"):
        listening.receive(*hello)
    assert listening.session is None


# ---- an adversary between all sides ---------------------------------------------------------------------------------


class Adversary:
    """It has all frames, delivers any of them to any side, and makes others of the nonces and proofs that it has seen.

    `made` is the truth: the proofs that sides with the secret have made, and no side has believed yet.
    """

    def __init__(self, draw: random.Random):
        self.draw = draw
        self.listeners = [ListeningHandshake(KNOWN) for _ in range(2)]
        self.callers = [caller() for _ in range(2)]
        self.nonces: list[str] = ["00" * 16]
        self.proofs: list[str] = ["00" * 32]
        self.frames: list[tuple[Header, bytes]] = []
        self.heard: dict[object, list[str]] = {}  # side -> nonces in its conversation: the listener's, the caller's
        self.made: set[tuple[str, str, str]] = set()  # whose proof, the listener's nonce, the caller's nonce
        self.convinced = 0
        for listener in self.listeners:
            greeting = listener.greet()
            self.heard[listener] = [content(greeting)["nonce"]]
            self._keep(greeting)

    def _keep(self, frame: tuple[Header, bytes]) -> None:
        self.frames.append(frame)
        value = content(frame)
        self.nonces += [value["nonce"]] if "nonce" in value else []
        self.proofs += [value["proof"]] if "proof" in value else []

    def forged(self) -> tuple[Header, bytes]:
        nonce, proof = self.draw.choice(self.nonces), self.draw.choice(self.proofs)
        kind = self.draw.choice((frames.GREETING, frames.HELLO, frames.HELLO, frames.WELCOME, frames.WELCOME))
        value = {
            frames.GREETING: {"version": frames.VERSION, "nonce": nonce},
            frames.HELLO: {"session": NAME, "nonce": nonce, "proof": proof},
            frames.WELCOME: {"proof": proof},
        }[kind]
        return framed(kind, value)

    def step(self) -> None:
        # Recent frames more often, so that some conversations come to their end.
        frame = self.draw.choice(self.frames[-4:] if self.draw.random() < 0.6 else self.frames)
        frame = frame if self.draw.random() < 0.7 else self.forged()
        to_listener = (frame[0].kind == frames.HELLO) == (self.draw.random() < 0.9)
        side = self.draw.choice(self.listeners if to_listener else self.callers)
        try:
            answer = side.receive(*frame)
        except DPSError:
            self._renew(side)
            return
        value, heard = content(frame), self.heard.setdefault(side, [])
        if side in self.listeners:
            listeners_nonce, callers_nonce = *heard, value["nonce"]
            assert ("client", listeners_nonce, callers_nonce) in self.made, "a listener believes a stranger"
            self.made.remove(("client", listeners_nonce, callers_nonce))
            self.made.add(("server", listeners_nonce, callers_nonce))
        elif answer is not None:
            heard += [value["nonce"], content(answer)["nonce"]]
            self.made.add(("client", heard[0], heard[1]))
        else:
            assert ("server", heard[0], heard[1]) in self.made, "a client believes a stranger"
            self.made.remove(("server", heard[0], heard[1]))
            self.convinced += 1
        if answer is not None:
            self._keep(answer)

    def _renew(self, side: ListeningHandshake | ConnectingHandshake) -> None:
        """A connection that has ended is replaced by a new one."""
        if side in self.listeners:
            self.listeners.remove(side)
            self.listeners.append(fresh := ListeningHandshake(KNOWN))
            greeting = fresh.greet()
            self.heard[fresh] = [content(greeting)["nonce"]]
            self._keep(greeting)
        else:
            self.callers.remove(side)
            self.callers.append(caller())


def attack(seeds: range) -> int:
    """Let an adversary try for each seed; how many clients were convinced, each rightly."""
    convinced = 0
    for seed in seeds:
        adversary = Adversary(random.Random(seed))
        for _ in range(200):
            adversary.step()
        convinced += adversary.convinced
    return convinced


def test_an_adversary_without_the_secret_convinces_neither_side() -> None:
    assert attack(range(200)) > 50, "the adversary delivers too little"


# ---- what must not pass ---------------------------------------------------------------------------------------------

PROOF = "json.dumps((side, *nonces))"
MUTANTS = [
    (handshake, "proof", PROOF, "json.dumps((side,))", attack, "believes a stranger"),
    (handshake, "proof", PROOF, "json.dumps((side, nonces[0]))", attack, "believes a stranger"),
    (handshake, "proof", PROOF, "json.dumps((side, nonces[1]))", attack, "believes a stranger"),
    (handshake, "proof", PROOF, "json.dumps(sorted(nonces))", attack, "a client believes a stranger"),
    (ListeningHandshake, "receive", "not proves(", "not (lambda *_: True)(", attack, "a listener believes"),
    (ConnectingHandshake, "receive", "not proves(", "not (lambda *_: True)(", attack, "a client believes"),
    (ConnectingHandshake, "__init__", "new_nonce()", '"00" * 16', attack, "a client believes"),
    (ListeningHandshake, "__init__", "new_nonce()", '"00" * 16', attack, "a listener believes"),
]


@pytest.mark.parametrize(("owner", "name", "old", "new", "check", "words"), MUTANTS)
def test_a_wrong_variant_is_caught(monkeypatch, owner, name: str, old: str, new: str, check, words: str) -> None:
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))
    with pytest.raises(AssertionError, match=words):
        check(range(400))


def once() -> None:
    test_each_side_takes_a_frame_once()
    test_a_listener_allows_one_attempt()


def limits() -> None:
    for (kind, limit), excess in itertools.product(LONG, (0, 8)):
        test_bodies_have_a_limit(kind, limit, excess)


def kinds() -> None:
    test_a_listener_takes_no_other_kind(frames.PUSH)


def sessions() -> None:
    test_a_listener_refuses_a_wrong_secret_and_a_wrong_name()
    test_a_session_does_not_open_another()


VERSIONS = test_another_version_is_refused_with_both_numbers
LAX = [
    (ListeningHandshake, "receive", "if self._tried:", "if False:", once),
    (ListeningHandshake, "receive", "STRANGER, header.kind, header.flags", "STRANGER, frames.HELLO, 0", kinds),
    (ListeningHandshake, "receive", "self._known.get(name)", "next(iter(self._known.values()))", sessions),
    (ConnectingHandshake, "receive", "due, self._due = self._due, None", "due = self._due", once),
    (ConnectingHandshake, "receive", "if header.kind != due:", "if False:", once),
    (ConnectingHandshake, "_answer", "version != frames.VERSION", "False", VERSIONS),
    (handshake, "_decoded", "header.body > limit", "False", limits),
    (handshake, "_decoded", "header.body > limit", "header.body > limit + 8", limits),
]


@pytest.mark.parametrize(("owner", "name", "old", "new", "check"), LAX)
def test_a_lax_variant_is_caught(monkeypatch, owner, name: str, old: str, new: str, check) -> None:
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check()
