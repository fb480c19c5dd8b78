"""Block hashes: the fields that they cover, and that all processes compute the same hash."""

import os
import subprocess
import sys

import msgspec

from penstock_common.block_hash import DIGEST_SIZE, BlockHasher
from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.kv_transfer import BlockStored
from penstock_common.types.media import EmbedRun
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_enginecore.core.request import Request
from penstock_frontend.dispatch.prefix_caches import PrefixCaches
from tests.fakes.engines.engine_harness import make_request
from tests.fakes.engines.fake_encoder import make_feature


def hashes(prompt, *, block_size=4, cache_salt="", num_tokens=None, lora=b""):
    adapter = LoraAdapter("name", "/path", lora) if lora else None
    request = Request(make_request(prompt, cache_salt=cache_salt, lora=adapter), client_id="c", max_model_len=1000)
    BlockHasher(block_size).extend(request, len(prompt) if num_tokens is None else num_tokens)
    return request.block_hashes


def test_only_full_blocks_are_hashed_with_128_bits():
    assert [len(h) for h in hashes(list(range(11)))] == [DIGEST_SIZE] * 2


def test_equal_prefixes_have_equal_hashes_and_what_follows_a_difference_differs():
    a = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    b = hashes([1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12])
    assert a[0] == b[0]
    assert a[1] != b[1]
    assert a[2] != b[2]


def test_the_same_tokens_at_another_place_differ():
    first, second = hashes([1, 2, 3, 4] * 2)
    assert first != second


def test_a_salt_changes_every_block():
    plain, salted = hashes(list(range(8))), hashes(list(range(8)), cache_salt="tenant")
    assert not set(plain) & set(salted)
    assert salted == hashes(list(range(8)), cache_salt="tenant")


def test_an_adapter_changes_every_block_by_its_content():
    one, other = bytes(16), bytes(15) + b"\1"
    prompt = list(range(8))
    every = [*hashes(prompt), *hashes(prompt, lora=one), *hashes(prompt, lora=other)]
    assert len(set(every)) == len(every)
    assert hashes(prompt, lora=one) == hashes(prompt, lora=one)


def test_no_salt_stands_for_an_adapter():
    digest = b"0123456789abcdef"
    prompt = list(range(4))
    plain, salted = hashes(prompt, lora=digest), hashes(prompt, cache_salt="s", lora=digest)
    for salt in (digest.decode(), "\xff" + digest.decode(), "s" + digest.decode(), "s\xff" + digest.decode()):
        assert hashes(prompt, cache_salt=salt) not in (plain, salted)


def test_block_sizes_do_not_mix():
    assert hashes([1, 2, 3, 4], block_size=4) != hashes([1, 2, 3, 4], block_size=2)[1:]
    assert hashes([1, 2], block_size=2)[0] not in hashes([1, 2, 3, 4], block_size=4)


def test_hashing_step_by_step_equals_hashing_at_once():
    tokens = list(range(50))
    request = Request(make_request(tokens), client_id="c", max_model_len=1000)
    hasher = BlockHasher(4)
    for count in range(len(tokens) + 1):
        hasher.extend(request, count)
        assert len(request.block_hashes) == count // 4
    assert request.block_hashes == hashes(tokens)


def test_another_process_computes_the_same_hashes():
    script = (
        "from penstock_common.block_hash import BlockHasher\n"
        "from penstock_enginecore.core.request import Request\n"
        "from penstock_common.types.request import EngineCoreRequest\n"
        "from penstock_common.types.request import RequestContext\n"
        "from penstock_common.types.sampling import SamplingParams\n"
        "r = EngineCoreRequest(request_id='x', prompt_token_ids=list(range(9)), sampling_params=SamplingParams(),\n"
        "                      context=RequestContext(cache_salt='s'))\n"
        "r = Request(r, client_id='c', max_model_len=99)\n"
        "BlockHasher(4).extend(r, 9)\n"
        "print(b''.join(r.block_hashes).hex())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == b"".join(hashes(list(range(9)), cache_salt="s")).hex()


def embedded(data: bytes = bytes(range(24)), is_token: bytes = b"") -> Request:
    num_tokens = len(is_token) or len(data) // 2
    embeds = PromptEmbeds(
        dtype="float16", num_tokens=num_tokens, hidden_size=1, data=bytearray(data), is_token=is_token
    )
    made = msgspec.structs.replace(make_request([0] * num_tokens), prompt_embeds=embeds)
    return Request(made, client_id="c", max_model_len=1000)


def hashed(request: Request) -> list[bytes]:
    BlockHasher(4).extend(request, request.num_tokens)
    return request.block_hashes


def test_the_vectors_of_a_shared_prompt_are_hashed_once():
    first = hashed(embedded())
    shared = embedded()
    second = Request(
        msgspec.structs.replace(make_request([0] * 12), prompt_embeds=shared.prompt_embeds),
        client_id="c",
        max_model_len=1000,
    )
    assert hashed(shared) == first
    shared.prompt_embeds.data[:] = bytes(24)  # the hashes are cached, so this change has no effect
    assert hashed(second) == first


def test_each_block_of_a_mixed_prompt_covers_its_own_vectors_and_their_places():
    mask = bytes([0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1])
    base = hashed(embedded(bytes(range(8)), mask))
    changed = hashed(embedded(bytes(range(6)) + b"xx", mask))
    moved = hashed(embedded(bytes(range(8)), bytes([1, 0, *mask[2:]])))
    assert [a == b for a, b in zip(base, changed, strict=True)] == [True, True, False]
    assert base[0] != moved[0]


def of_media(*features, prompt=(0,) * 12, block_size=4):
    request = Request(make_request(list(prompt), mm_features=features), client_id="c", max_model_len=1000)
    BlockHasher(block_size).extend(request, len(prompt))
    return request.block_hashes


def test_a_medium_changes_the_blocks_in_which_it_lies_and_those_behind():
    plain, one, other = of_media(), of_media(make_feature(1, 5, 4)), of_media(make_feature(2, 5, 4))
    assert plain[0] == one[0] == other[0]
    for block in (1, 2):
        assert len({plain[block], one[block], other[block]}) == 3
    assert of_media(make_feature(1, 5, 4)) == one


def test_it_matters_where_a_medium_begins_and_which_positions_have_its_embeddings():
    features = [
        make_feature(1, 0, 8),
        make_feature(1, 1, 8),
        make_feature(1, 0, 9),
        make_feature(1, 0, 8, embed_runs=(EmbedRun(0, 8),)),
        make_feature(1, 0, 8, embed_runs=(EmbedRun(0, 2), EmbedRun(3, 5))),
    ]
    every = [of_media(feature)[0] for feature in features]
    assert every[0] == every[2]  # tokens after a block do not change its hash
    assert len(set(every)) == len(features) - 1
    inside = [of_media(make_feature(1, offset, 8 - offset))[1] for offset in (0, 4)]
    assert len(set(inside)) == 2


def test_frontends_hash_media_as_engines_do():
    request = make_request([0] * 12, mm_features=[make_feature(1, 3, 4)])
    caches = PrefixCaches(100)
    caches.begin("e", 4)
    caches.settle("e", {})
    hashed = of_media(make_feature(1, 3, 4))
    caches.apply("e", [BlockStored(block_hashes=hashed, parent_hash=b"", token_ids=[0] * 12, block_size=4)])
    assert caches.cached_tokens(request) == {"e": 11}
    other = make_request([0] * 12, mm_features=[make_feature(2, 3, 4)])
    assert caches.cached_tokens(other) == {}
