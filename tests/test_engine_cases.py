# SPDX-License-Identifier: Apache-2.0
"""Cases from the field that an engine without a GPU can show; see tests/cases/engine.yaml.

Everything is FP32 and greedy, so tokens must be equal and logprobs differ by rounding alone:
1e-5 or less is seen, a state of another request or pass costs 0.1 and more.
"""

import shutil
import subprocess
import sys

import pytest

from tests.engines import answers, configure, engine, ids, largest_logprob_difference

LOGPROB_LIMIT = 1e-4
LENGTHS = (255, 256, 257, 511, 700, 1055, 1056, 1057, 3000)


@pytest.fixture(scope="module")
def tiny(checkpoint):
    return checkpoint("tiny")


@pytest.fixture(scope="module")
def boundary_prompts():
    return {f"n{length}": ids(length, seed=length) for length in LENGTHS}


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    """An engine that prefills in one step and caches no prefix: what others are held against."""
    with engine(tiny, tmp_path_factory.mktemp("plain")) as served:
        yield served


@pytest.fixture(scope="module")
def unchunked(plain, boundary_prompts):
    """Every prompt alone, prefilled in one step."""
    return plain.run(boundary_prompts, [("alone", list(boundary_prompts))]).requests


# In between, and without the cache: the chunks of 37 and 64 tokens in matrices/cpu_parity.yaml.
@pytest.mark.parametrize("chunk", [64, 2048])
def test_chunks_of_a_prefill_change_nothing(  # case G4-04
    tiny, boundary_prompts, unchunked, tmp_path, chunk
):
    with engine(tiny, tmp_path, max_num_batched_tokens=chunk, enable_prefix_caching=True) as served:
        batched = served.run(boundary_prompts, [("batched", list(boundary_prompts))]).requests
    assert answers(batched) == answers(unchunked)
    assert largest_logprob_difference(unchunked, batched) < LOGPROB_LIMIT


def test_hits_are_whole_blocks_and_change_nothing(tiny, plain, tmp_path):  # case G4-01
    with engine(tiny, tmp_path, enable_prefix_caching=True) as served:
        block = served.facts["block_size"]
        shared = ids(3 * block)
        prompts = {f"suffix{i}": shared + ids(50, seed=100 + i) for i in range(4)}
        prompts["short"] = ids(block - 1, seed=7)
        prompts |= {f"late{i}": shared[: block - 20] + ids(40, seed=200 + i) for i in range(2)}
        cached = served.run(prompts, [("alone", list(prompts)), ("alone", ["short"])]).requests
    uncached = plain.run(prompts, [("alone", list(prompts))]).requests
    assert answers(cached) == answers(uncached)
    assert largest_logprob_difference(uncached, cached) < LOGPROB_LIMIT
    hits = [(request.prompt, request.num_cached_tokens) for request in cached]
    assert hits[0] == ("suffix0", 0)
    # The first repeat of a prefix may only note the junction; the next must find it.
    assert all(count in (0, 3 * block) for _, count in hits[1:4])
    assert hits[2][1] == hits[3][1] == 3 * block
    assert [count for name, count in hits if name in ("short", "late0", "late1")] == [0, 0, 0, 0]


def test_a_state_lost_to_eviction_is_computed_again(tiny, tmp_path):  # case G4-02
    """Fill the cache, push part of it out with unrelated prompts, and ask for it again."""
    small = {"max_model_len": 1024, "num_gpu_blocks_override": 16, "max_num_seqs": 2}
    with engine(tiny, tmp_path, enable_prefix_caching=True, **small) as served:
        block = served.facts["block_size"]
        shared = ids(2 * block + 10)
        prompts = {"first": shared + ids(9, seed=1), "again": shared + ids(9, seed=2)}
        prompts |= {f"other{i}": ids(block + 40 * i, seed=50 + i) for i in range(6)}
        for others in range(6):
            evicting = [f"other{i}" for i in range(others)]
            rounds = [("alone", ["first", "first", *evicting, "again", "first"])]
            requests = served.run(prompts, rounds).requests
            found = answers(requests)
            if others == 0:
                expected = found
                assert requests[1].num_cached_tokens > 0
            assert found["first"] == expected["first"]
            assert found["again"] == expected["again"]
            hits = [request.num_cached_tokens for request in requests]
            assert all(count % block == 0 for count in hits)
    assert requests[-2].num_cached_tokens == 0  # the last run did evict


def test_a_prompt_that_just_fits_the_pool_is_answered(tiny, unchunked, tmp_path):  # case G4-05
    """It is neither prefilled again and again nor left waiting while others run."""
    small = {"max_model_len": 1072, "num_gpu_blocks_override": 12, "max_num_seqs": 4}
    prompts = {"n1056": ids(1056, seed=1056), "n700": ids(700, seed=700)}
    with engine(tiny, tmp_path, enable_prefix_caching=True, **small) as served:
        names = ["n700", "n1056", "n700", "n1056"]
        crowded = served.run(prompts, [("batched", names)], max_tokens=16).requests
    alone = [request for request in unchunked if request.prompt in prompts]
    assert answers(crowded) == answers(alone)


def test_the_first_answers_come_again_after_hours_of_traffic_in_small(tiny, tmp_path):  # G4-06
    """Short requests of every length over a small pool, a third of them cancelled midway."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cancelling_engine", str(tiny)],
        check=False,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "20 of 20 answers equal, 133 of 400 requests cancelled" in done.stdout


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_two_ranks_give_the_answers_of_one(  # cases G4-08 and G6-01
    tiny, boundary_prompts, unchunked, tmp_path, start_method
):
    """Tensor parallelism in processes of its own: each loads the plugin and its configuration."""
    names = ["n255", "n257", "n700"]
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": start_method,
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        # The harness sends a function to the workers, to look at their cache tensors.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    with engine(
        tiny,
        tmp_path,
        environment,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    ) as served:
        split = served.run(boundary_prompts, [("batched", names)]).requests
    alone = [request for request in unchunked if request.prompt in names]
    assert answers(split) == answers(alone)
    assert largest_logprob_difference(alone, split) < LOGPROB_LIMIT


@pytest.mark.parametrize(("given", "state"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_the_state_has_the_dtype_asked_for_in_the_tensors_themselves(  # case G4-09
    checkpoint, tmp_path, given, state
):
    with engine(
        checkpoint("tiny"), tmp_path, dtype="bfloat16", mamba_ssm_cache_dtype=given
    ) as served:
        facts = served.facts
        (request,) = served.run({"p": ids(300)}, [("alone", ["p"])]).requests
    if given != "auto" and facts["mamba_ssm_cache_dtype"] == "float32":
        state = "float32"  # CPUs with AVX512_BF16 run the scan in float32 whatever is asked
    assert facts["mamba_ssm_cache_dtype"] == state
    assert facts["cache_tensor_dtypes"]["ssm"] == [state]
    assert facts["cache_tensor_dtypes"]["conv"] == ["bfloat16"]
    assert all(logprob <= 0 for logprob in request.logprobs)


def test_a_float8_kv_cache_leaves_the_states_alone(tiny, tmp_path):  # case G5-05
    with engine(tiny, tmp_path, kv_cache_dtype="fp8", enable_prefix_caching=True) as served:
        facts = served.facts
        requests = served.run({"p": ids(700)}, [("alone", ["p"]), ("alone", ["p"])]).requests
    assert facts["cache_tensor_dtypes"]["ssm"] == ["float32"]
    assert facts["cache_tensor_dtypes"]["conv"] == ["float32"]
    assert all(-50 < logprob <= 0 for request in requests for logprob in request.logprobs)


def test_a_folder_whose_name_has_dots_is_served_without_its_own_code(checkpoint, tmp_path):  # G6-05
    folder = tmp_path / "Metis-1.6-Logos"
    shutil.copytree(checkpoint("tiny"), folder)
    for code in folder.glob("*.py"):
        code.write_text("raise AssertionError('the code of the repository was imported')\n")
    assert configure(folder).model_config.architecture == "Metis16ForCausalLM"
    with engine(folder, tmp_path, trust_remote_code=True) as served:
        (request,) = served.run({"p": ids(5)}, [("alone", ["p"])], max_tokens=2).requests
        assert len(request.token_ids) == 2
