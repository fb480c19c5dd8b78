"""The secret of internal ports: its file, the keys and tokens derived from it, and which ports need it."""

from pathlib import Path

import pytest

from penstock_common.errors import ConfigError
from penstock_common.security import shared_secret
from penstock_common.security.shared_secret import NO_SECRET, ProofError, SharedSecret, check_internal_port, load_secret

TEXT = "0123456789abcdef" * 2


def secret_file(tmp_path: Path, content: str, mode: int = 0o600) -> str:
    file = tmp_path / "secret"
    file.write_text(content)
    file.chmod(mode)
    return str(file)


def test_whitespace_around_a_secret_does_not_count(tmp_path: Path) -> None:
    loaded = load_secret(secret_file(tmp_path, f"  {TEXT}\n\n"))
    assert loaded is not None
    assert loaded.key("p") == SharedSecret(TEXT.encode()).key("p")


def test_without_a_path_there_is_no_secret() -> None:
    assert load_secret("") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"parallel\.secret_file: \S+ contains 0 bytes; a secret has at least 32 bytes; create one with `openssl"),
        (f"{TEXT[:31]}\n", r"contains 31 bytes; a secret has at least 32"),
        ("x" * 4097, r"is larger than 4096 bytes"),
    ],
)
def test_a_file_that_holds_no_secret_is_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_secret(secret_file(tmp_path, content))


def test_a_file_that_cannot_be_read_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.secret_file: cannot read \S+/none: No such file"):
        load_secret(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"own\.setting: cannot read"):
        load_secret(str(tmp_path), field="own.setting")


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o440, False), (0o644, True)])
def test_a_secret_that_every_user_can_read_is_warned_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: int, warns: bool
) -> None:
    assert load_secret(secret_file(tmp_path, TEXT, mode)) is not None
    said = "".join(capfd.readouterr())
    assert ("every user of this machine can read the shared secret" in said) is warns
    assert TEXT not in said


def test_keys_and_tokens_of_other_purposes_and_secrets_differ() -> None:
    one, other = SharedSecret(TEXT.encode()), SharedSecret(b"o" * 32)
    made = {one.key("a"), one.key("b"), other.key("a"), NO_SECRET.key("a")}
    made |= {bytes.fromhex(each.token("a")) for each in (one, other, NO_SECRET)}
    assert len(made) == 7
    assert all(len(each) == 32 for each in made)


def test_only_the_token_of_the_same_purpose_and_secret_is_accepted() -> None:
    one, other = SharedSecret(TEXT.encode()), SharedSecret(b"o" * 32)
    assert one.accepts("nodes", one.token("nodes"))
    for wrong in (one.token("blocks"), other.token("nodes"), NO_SECRET.token("nodes"), "", "é", "\udcff"):
        assert not one.accepts("nodes", wrong)


def test_a_secret_is_not_shown_where_the_object_is_printed() -> None:
    assert TEXT not in repr(SharedSecret(TEXT.encode()))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_ports_on_loopback_need_no_secret(host: str) -> None:
    check_internal_port(host, field="executor.nodes.address", has_secret=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "engine-0"])
def test_other_ports_need_the_secret_or_tls(host: str) -> None:
    check_internal_port(host, field="server.host", has_secret=True)
    check_internal_port(host, field="server.host", has_secret=False, tls=True, tls_field="server.tls.certificate")
    with pytest.raises(ConfigError) as refused:
        check_internal_port(host, field="server.host", has_secret=False, tls_field="server.tls.certificate")
    for named in (host, "server.host", "parallel.secret_file", "server.tls.certificate"):
        assert named in str(refused.value)
    with pytest.raises(ConfigError, match=r"set parallel\.secret_file, or bind to a loopback address"):
        check_internal_port(host, field="data_parallel.address", has_secret=False)


# Mutual proofs over a connection: which proofs pass, and that a proof is worthless on another connection.

SECRET = SharedSecret(b"s" * 32)
KEY = SECRET.key("mesh")
OTHERS = [SharedSecret(b"o" * 32).key("mesh"), SECRET.key("store"), NO_SECRET.key("mesh")]


class Connection:
    """One handshake; ``key`` is the key of the connecting side."""

    def __init__(self, key: bytes = KEY) -> None:
        self.key = key
        self.connecting, self.listening = shared_secret.new_nonce(), shared_secret.new_nonce()
        self.hello = shared_secret.hello(self.connecting)
        self.reply = shared_secret.reply(KEY, self.hello, self.listening)

    def proof(self, claim: bytes = b"") -> bytes:
        return shared_secret.proof(self.key, self.connecting, self.reply, claim)

    def claim_in(self, proof: bytes) -> bytes:
        return shared_secret.checked_claim(KEY, self.hello, self.listening, proof)


@pytest.mark.parametrize("claim", [b"", b"\0\0\0\7"])
def test_two_that_know_the_key_agree_on_the_claim(claim: bytes) -> None:
    connection = Connection()
    assert (len(connection.hello), len(connection.reply)) == (shared_secret.HELLO_BYTES, shared_secret.REPLY_BYTES)
    proof = connection.proof(claim)
    assert len(proof) == len(claim) + shared_secret.PROOF_BYTES
    assert connection.claim_in(proof) == claim


@pytest.mark.parametrize("other", OTHERS)
def test_a_listener_with_another_secret_or_purpose_gets_no_proof(other: bytes) -> None:
    with pytest.raises(ProofError, match="listener does not have the same shared secret"):
        Connection(other).proof()


@pytest.mark.parametrize("other", OTHERS)
def test_a_peer_with_another_secret_or_purpose_does_not_pass(other: bytes) -> None:
    connection = Connection()
    theirs = shared_secret.reply(other, connection.hello, connection.listening)
    forged = shared_secret.proof(other, connection.connecting, theirs, b"claim")
    with pytest.raises(ProofError, match="peer does not have the same shared secret"):
        connection.claim_in(forged)


def test_a_proof_is_worth_nothing_on_another_connection() -> None:
    first, second = Connection(), Connection()
    with pytest.raises(ProofError):
        second.claim_in(first.proof())
    again = Connection()  # the same hello is replayed, but the listener's nonce differs
    again.hello = first.hello
    with pytest.raises(ProofError):
        again.claim_in(first.proof())


def test_a_listeners_proof_is_worth_nothing_when_it_is_sent_back() -> None:
    connection = Connection()
    mirrored = shared_secret.reply(KEY, shared_secret.hello(connection.listening), connection.connecting)
    for shown in (connection.reply[shared_secret.NONCE_BYTES :], mirrored[shared_secret.NONCE_BYTES :]):
        with pytest.raises(ProofError):
            connection.claim_in(shown)


def test_a_proof_holds_for_its_claim_alone() -> None:
    connection = Connection()
    proof = connection.proof(b"rank1")
    for changed in (b"rank2" + proof[5:], proof[5:], b"rank" + proof, proof[:-1] + b"\0\0", b""):
        with pytest.raises(ProofError):
            connection.claim_in(changed)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n" + b" " * 24, b"\0" * 40, b"penstok1"])
def test_another_protocol_is_told_apart(said: bytes) -> None:
    with pytest.raises(ProofError, match="does not belong to the authentication protocol"):
        shared_secret.reply(KEY, said, shared_secret.new_nonce())
