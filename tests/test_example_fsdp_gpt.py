"""The FSDP example: one process and two train alike, and a checkpoint of two goes on in one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmp.audit._targets import TargetUnavailableError, parse_target, require_compiler

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*options, check=True):
    # Devices are counted by the script itself.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-W", "error", str(EXAMPLES / "fsdp_gpt.py"), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=False, env=environment
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


def losses(done):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss=(\S+)", done)}


@pytest.mark.slow
def test_two_processes_train_as_one_and_one_goes_on_from_their_checkpoint(tmp_path):
    folder = str(tmp_path / "run")
    one = losses(run("--smoke", "--steps", "20", "--policy", "float32").stdout)
    options = ("--smoke", "--policy", "float32", "--checkpoint", folder)
    two = run(*options, "--steps", "10", "--processes", "2").stdout
    assert "8 devices in 2 processes" in two
    assert losses(two).keys() == {1, 10}
    rest = losses(run(*options, "--steps", "10").stdout)
    assert rest.keys() == {11, 20}
    # Sums in another order, carried on for twenty steps, and four decimals.
    for step, loss in {**losses(two), 20: rest[20]}.items():
        assert abs(loss - one[step]) < 2e-4
    assert one[20] < one[1] - 1


@pytest.mark.slow
def test_both_kinds_of_parallelism_in_f16():
    done = run("--smoke", "--layout", "fsdp+tp", "--policy", "mixed_float16").stdout
    assert "'data': 4, 'model': 2" in done
    assert losses(done)[20] < losses(done)[1] - 1


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others(tmp_path):
    folder = tmp_path / "no folder"
    folder.write_text("")
    options = ("--processes", "2", "--steps", "1", "--checkpoint", str(folder))
    done = run("--smoke", *options, check=False)
    assert done.returncode != 0
    assert "Traceback" in done.stderr


@pytest.mark.audit
def test_it_shows_what_moves_on_hardware_that_is_not_here():
    targets = ("tpu:v5e:2x4", "cuda:h100:1x1x8")
    for target in targets:
        try:
            require_compiler(parse_target(target))
        except TargetUnavailableError as error:
            pytest.skip(str(error))
    done = run("--audit", "--size", "tiny").stdout
    for target in targets:
        assert re.search(rf"^{target}: \S+ GB at most on each device", done, re.MULTILINE)
    assert re.search(r"MB of bfloat16 by all-gather", done)
    assert re.search(r"MB of float32 by (reduce-scatter|all-reduce)", done)
