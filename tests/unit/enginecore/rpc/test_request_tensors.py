"""Features of media as an engine reads them, from valid and invalid messages."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.common.v1 import tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import RequestFailed
from penstock_common.tensors.chunks import IncomingTensors
from penstock_common.tensors.shared_memory import SegmentReader, SegmentWriter, owner_of
from penstock_enginecore.media.core.receiver_cache import ReceiverCache
from penstock_enginecore.rpc.request_tensors import FeatureReader
from tests.fakes.systems.media_session import identifier_of

QUOTA = 100
sizes = st.one_of(st.integers(0, 20), st.sampled_from([2**31, 2**63 - 1, 2**64 - 1]))
segment_names = st.one_of(
    st.integers(1, 4).map(lambda number: f"penstock-{owner_of('f')}-{number}"),
    st.sampled_from(["", "/", "../secret", f"penstock-{owner_of('g')}-1", f"penstock-{owner_of('f')}.lock"]),
)
payloads = st.one_of(
    st.binary(max_size=20).map(lambda data: {"inline": data}),
    st.builds(
        lambda transfer_id, size, keep: {
            "chunks": tensor_pb2.ChunkReference(transfer_id=transfer_id, size=size, keep=keep)
        },
        st.integers(1, 4),
        sizes,
        st.booleans(),
    ),
    st.builds(
        lambda name, offset, size: {
            "shared_memory": tensor_pb2.SharedMemoryReference(name=name, offset=offset, size=size)
        },
        segment_names,
        st.one_of(st.just(0), sizes),
        sizes,
    ),
    st.just({}),
)
tensors = st.builds(
    lambda dtype, shape, payload: tensor_pb2.Tensor(dtype=dtype, shape=shape, **payload),
    st.sampled_from([0, 1, 6, 6, 6, 9]),
    st.lists(sizes, max_size=3),
    payloads,
)
features: st.SearchStrategy[pb.MultiModalFeature] = st.builds(
    lambda modality, identifier, offset, length, data, keep: pb.MultiModalFeature(
        modality=modality, identifier=identifier, offset=offset, length=length, data=data, keep=keep
    ),
    st.sampled_from(["image", "image", "image", "audio", "", "x" * 100]),
    st.sampled_from([*map(identifier_of, "ab"), *map(identifier_of, "ab"), "", "x" * 64]),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.dictionaries(st.sampled_from(["pixel_values", "embeds", "", "\U0001f642" * 100]), tensors, max_size=3),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(features, max_size=3), max_size=5), st.lists(st.binary(max_size=20), max_size=4))
def test_whatever_a_message_says_it_ends_its_request_alone(
    messages: list[list[pb.MultiModalFeature]], data: list[bytes]
) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder) / "shm"
        root.mkdir()
        (Path(folder) / "secret").write_bytes(b"secret")
        writer, other = SegmentWriter("f", root=root), SegmentWriter("g", root=root)
        other.write(b"another's")
        incoming, cache = IncomingTensors(1000), ReceiverCache(QUOTA)
        session = cache.session()
        reader = FeatureReader(incoming, session, SegmentReader("f", root=root))
        for number, each in enumerate(data, start=1):
            incoming.add(number, 0, each)
            writer.write(each)
        for each in messages:
            before = session.identifiers
            named = [tensor.shared_memory.name for feature in each for tensor in feature.data.values()]
            try:
                read = reader.read(pb.EngineCoreRequest(mm_features=each))
            except RequestFailed:
                assert session.identifiers == before
            else:
                assert [feature.identifier for feature in read] == [feature.identifier for feature in each]
                assert all(feature.data for feature in read)
            assert session.num_bytes <= QUOTA
            assert not any(name.startswith(f"penstock-{owner_of('f')}-") and (root / name).exists() for name in named)
        assert (Path(folder) / "secret").read_bytes() == b"secret"
        assert (root / f"penstock-{owner_of('g')}-1").exists()
        assert (root / f"penstock-{owner_of('f')}.lock").exists() == bool(data)
        writer.close()
        other.close()
        assert list(root.iterdir()) == []
