"""Compiles one program for hardware that is not there: `python -m jaxmp.audit._child`.

A process of its own, because a compiler for one platform and the user's JAX on another need
different environments, and because a compiler may crash. Reads a line of JSON and an exported
program from standard input; writes a marker and JSON to standard output, where nothing else goes.
"""

import json
import os
import sys
from typing import Any

import jax
import jax.export
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxmp.audit._compiled import (
    RESULT_MARKER,
    compile_and_report,
    place_input,
    place_mesh,
    report_to_json,
)
from jaxmp.audit._rows import CompiledReport

_MESSAGE_LINES = 15  # some compilers append their whole stack


def main() -> None:
    """Does the job on standard input."""
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # compilers write to standard output too
    header, _, program = sys.stdin.buffer.read().partition(b"\n")
    try:
        answer = report_to_json(compile_job(json.loads(header), program))
    except Exception as error:  # whatever it is, the parent tells the user
        lines = f"{type(error).__name__}: {error}".splitlines()[:_MESSAGE_LINES]
        answer = json.dumps({"error": "\n".join(lines)}).encode()
    with result:
        result.write(RESULT_MARKER + answer)


def compile_job(job: dict[str, Any], program: bytes) -> CompiledReport:
    """Compiles an exported program for the topology that `job` describes."""
    jax.config.update("jax_enable_x64", job["x64"])
    exported = jax.export.deserialize(bytearray(program))
    devices = topologies.get_topology_desc(**job["topology"]).devices
    mesh = place_mesh(job["mesh"], devices)
    if mesh is None:
        shardings = [SingleDeviceSharding(devices[0])] * len(exported.in_avals)
    else:
        whole = NamedSharding(mesh, PartitionSpec())
        shardings = [sharding or whole for sharding in exported.in_shardings_jax(mesh)]
    return compile_and_report(
        exported.call,
        [place_input(aval, s) for aval, s in zip(exported.in_avals, shardings, strict=True)],
        donated=job["donated"],
        device=devices[0],
        device_count=exported.nr_devices,
        target=job["target"],
        device_memory=job["device_memory"],
    )


if __name__ == "__main__":
    main()
