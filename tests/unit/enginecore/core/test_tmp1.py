from tests.fakes.engines.engine_harness import *
def test_a():
    engine = make_engine(num_blocks=20, host_blocks=64, max_num_batched_tokens=64)
    a = make_request(40, max_tokens=8)
    t = run_to_end(engine, a)
    b = make_request([7]*60, max_tokens=8)
    run_to_end(engine, b)
    print(engine.executor.copier.num_copied)
    c = make_request(40, max_tokens=8)
    t = run_to_end(engine, c)
    print(engine.executor.copier.num_copied, t.outputs[c.request_id][0].prefill_stats)
    assert_as_expected(engine, t, c)
    assert_nothing_left(engine)
