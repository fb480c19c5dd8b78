"""Parameter names of vLLM and transformers are refused, and the error gives the right name."""

import asyncio
import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import penstock_local
from penstock_common.errors import InvalidArgument
from penstock_common.types import sampling
from penstock_local import AsyncLLMEngine, BeamSearchParams, JsonWhitespace, LLMEngine, SamplingParams, StructuredOutput
from penstock_local.llm import parameters
from penstock_local.llm.inputs import sampling_of
from penstock_local.llm.llm import LLM

FOREIGN = [
    (SamplingParams, "structured_outputs", "use structured_output, e.g. structured_output=StructuredOutput("),
    (SamplingParams, "guided_decoding", "use structured_output, e.g. structured_output=StructuredOutput("),
    (SamplingParams, "best_of", "use n with logprobs=0, and keep the output with the highest cumulative_logprob"),
    (SamplingParams, "use_beam_search", "use LLM.beam_search with BeamSearchParams("),
    (SamplingParams, "max_new_tokens", "use max_tokens"),
    (SamplingParams, "do_sample", "use temperature; 0 is greedy"),
    (SamplingParams, "logits_processors", "leave it out: logit_bias, allowed_token_ids and bad_words change logits"),
    (SamplingParams, "temprature", "did you mean 'temperature'?"),
    (StructuredOutput, "json", "use json_schema, as a dict or as JSON"),
    (StructuredOutput, "disable_any_whitespace", "use json_whitespace=JsonWhitespace.COMPACT"),
    (BeamSearchParams, "temperature", "leave it out: beams are ordered by the model's log-probabilities"),
    (BeamSearchParams, "num_beams", "use beam_width"),
]


@pytest.mark.parametrize(("kind", "name", "said"), FOREIGN)
def test_parameters_refuse_a_foreign_name_with_what_to_use(kind: Any, name: str, said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{kind.__name__} has no {name!r}; {said}")):
        kind(**{name: 1})


@pytest.mark.parametrize(("kind", "name", "said"), [each for each in FOREIGN if each[0] is not BeamSearchParams])
def test_a_mapping_of_parameters_is_refused_in_the_same_words(kind: Any, name: str, said: str) -> None:
    given = {name: 1} if kind is SamplingParams else {"structured_output": {name: 1}}
    refused = next(sampling_of([given], 1))
    assert isinstance(refused, InvalidArgument)
    assert f"{kind.__name__} has no {name!r}; {said}" in str(refused)


@pytest.mark.parametrize("name", ["foo", "bar", "stop_it_all_now", ""])
def test_a_name_that_is_like_none_gets_no_hint(name: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^sampling_params: SamplingParams has no '{name}'$"):
        sampling_of({name: 1}, 1)


@pytest.mark.parametrize("kind", [SamplingParams, StructuredOutput, BeamSearchParams])
def test_what_has_a_field_is_not_replaced(kind: Any) -> None:
    assert kind.replacements.keys() & set(kind.__struct_fields__) == set()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: LLM.generate(None, "x", temperature=0.5), "generate() has no argument 'temperature'; use sampling_params={"),  # type: ignore[arg-type, call-arg]
        (lambda: LLM.generate(None, "x", max_new_tokens=5), "generate() has no argument 'max_new_tokens'; use max_tokens"),  # type: ignore[arg-type, call-arg]
        (lambda: LLM.generate(None, "x", params=None), "generate() has no argument 'params'; use sampling_params"),  # type: ignore[arg-type, call-arg]
        (lambda: LLM.embed(None, "x", normalise=True), "embed() has no argument 'normalise'; did you mean 'normalize'?"),  # type: ignore[arg-type, call-arg]
        (lambda: LLMEngine.add_request(None, "a", "x", sampling_params=None), "'sampling_params'; use params"),  # type: ignore[arg-type, call-arg]
        (lambda: LLMEngine.add_request(None, "a", "x", lora_request=None), "'lora_request'; leave it out: only LLM"),  # type: ignore[arg-type, call-arg]
        (lambda: AsyncLLMEngine.generate(None, "x", trace_headers={}), "generate() has no argument 'trace_headers'; leave"),  # type: ignore[arg-type, call-arg]
    ],
)  # fmt: skip
def test_methods_refuse_a_foreign_argument_with_what_to_use(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        call()


def test_the_package_refuses_names_of_vllm_with_what_to_use() -> None:
    with pytest.raises(
        ImportError, match=r"'PoolingParams' from 'penstock_local'; use the keywords of embed, classify"
    ):
        from penstock_local import PoolingParams  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ImportError, match="'StructuredOutputsParams' from 'penstock_local'; use StructuredOutput"):
        _ = penstock_local.StructuredOutputsParams
    assert not hasattr(penstock_local, "NothingOfTheKind")
    assert parameters.TYPES.keys() & set(penstock_local.__all__) == set()


def test_sampling_params_may_be_changed_and_cloned() -> None:
    params = SamplingParams(max_tokens=5, logit_bias={3: 1.0})
    clone = params.clone(temperature=0.5)
    clone.logit_bias[4] = 2.0
    params.top_k = 7
    assert (params.temperature, params.top_k, params.logit_bias) == (1.0, 7, {3: 1.0})
    assert (clone.temperature, clone.top_k, clone.max_tokens) == (0.5, 0, 5)
    with pytest.raises(TypeError, match="SamplingParams has no 'best_of'; use n with"):
        params.clone(best_of=2)


def test_what_is_changed_is_checked_when_it_is_used() -> None:
    params = SamplingParams()
    params.temperature = "hot"  # type: ignore[assignment]
    with pytest.raises(InvalidArgument, match="Expected `float`, got `str`"):
        sampling_of(params, 1)


def test_parameters_are_those_of_the_contract_and_survive_copies() -> None:
    params = SamplingParams(
        n=2, structured_output=StructuredOutput(json_object=True, json_whitespace=JsonWhitespace.ANY)
    )
    assert isinstance(params, sampling.SamplingParams)
    assert SamplingParams.__struct_fields__ == sampling.SamplingParams.__struct_fields__
    for same in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), msgspec.structs.replace(params)):
        assert same == params
        assert type(same) is SamplingParams


def test_an_engines_generate_is_an_asynchronous_generator_still() -> None:
    async def first() -> None:
        await anext(AsyncLLMEngine.generate(None, "x"))  # type: ignore[arg-type]

    with pytest.raises(AttributeError, match="_runtime"):
        asyncio.run(first())
