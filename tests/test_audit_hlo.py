"""What is read from optimized HLO."""

import pytest

from jaxmp.audit._compiled_rows import (
    collectives,
    estimated_cycles,
    fusions,
    group_size,
    op_path,
    products,
    wide_copies,
)
from jaxmp.audit._flops import product_flops
from jaxmp.audit._hlo import Array, HloError, arrays, parse
from jaxmp.audit._traffic import repeated_bytes


def computation(name, *lines, keyword=""):
    body = "".join(f"  {line}\n" for line in lines)
    return f"{keyword}%{name} (p: f32[2]) -> f32[2] {{\n{body}}}\n\n"


def entry(*lines, header="HloModule m", before=""):
    """A module whose entry computation has these lines."""
    return parse(f"{header}\n\n{before}{computation('main', *lines, keyword='ENTRY ')}")


def test_shapes_with_tuples_and_tilings():
    module = entry(
        "%p = (s32[]{:T(128)}, (bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/pred[]),"
        " f8e4m3fn[3,<=4]{1,0}, ()) parameter(0)",
        "ROOT %t = token[] after-all()",
    )
    (parameter, root) = module.computations["main"].instructions.values()
    flat = arrays(parameter.shape)
    assert [array.dtype for array in flat] == ["int32", "bfloat16", "bool", "float8_e4m3fn"]
    assert [array.dims for array in flat] == [(), (8, 128), (), (3, 4)]
    assert [array.bytes for array in flat] == [4, 2048, 1, 12]
    assert flat[1].layout == "{1,0:T(8,128)(2,1)S(1)}"
    assert parameter.shape[3] == ()
    assert root.is_root
    assert arrays(root.shape)[0].bytes == 0
    assert Array("s4", (3,)).bytes == 2


def test_attributes_with_nested_braces_and_quotes():
    module = entry(
        "%p = f32[2]{0} parameter(0)",
        'ROOT %c.1 = f32[2]{0} custom-call(f32[2]{0} %p, %p), custom_call_target="a, b=(c",'
        ' operand_layout_constraints={f32[2]{0}, f32[2]{0}}, metadata={op_name="jit(f)/a \\"}{"'
        ' stack_frame_id=3}, backend_config={"a":{"n":"6"},"b":["}"]}',
    )
    call = module.computations["main"].root
    assert call.operands == ("p", "p")
    assert call.target == "a, b=(c"
    assert call.attributes["operand_layout_constraints"] == "{f32[2]{0}, f32[2]{0}}"
    assert call.op_name == 'jit(f)/a \\"}{'
    assert call.config == {"a": {"n": "6"}, "b": ["}"]}


def test_backend_config_as_quoted_text_or_not_json():
    module = entry(
        '%a = f32[2] custom-call(), backend_config="{\\"known\\":{\\"n\\":\\"7\\"}}"',
        '%b = f32[2] custom-call(), backend_config="plain"',
        "ROOT %c = f32[2] custom-call(), backend_config=opaque",
    )
    configs = [i.config for i in module.computations["main"].instructions.values()]
    assert configs == [{"known": {"n": "7"}}, {}, {}]


@pytest.mark.parametrize("line", ["nonsense", "%a = what", "%a = f32[2] %b", "%a = f32 add()"])
def test_a_line_that_is_not_hlo_is_an_error(line):
    with pytest.raises(HloError, match=r"f32|nonsense|what|opcode"):
        entry(line)


def test_text_without_entry_is_an_error():
    with pytest.raises(HloError, match="no ENTRY"):
        parse("HloModule m\n")


_OPERANDS = ("%a = bf16[8,32]{1,0} parameter(0)", "%b = bf16[32,16]{1,0} parameter(1)")
_GEMM = (
    "ROOT %g = (bf16[8,16]{1,0}, s8[4]{0}) custom-call(%a, %b),"
    ' custom_call_target="__cublas$lt$matmul",'
    ' metadata={op_name="jit(step)/jvp(Block_0)/Dense_1/dot_general"},'
    ' backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],'
    '"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
)


def test_times_are_multiplied_through_nested_loops():
    def trips(number):
        return f'backend_config={{"known_trip_count":{{"n":"{number}"}}}}'

    middle = f"ROOT %w = f32[2] while(%x), condition=%cond, body=%inner, {trips(5)}"
    before = (
        computation("inner", *_OPERANDS, _GEMM)
        + computation("cond", "ROOT %c = pred[] constant(true)")
        + computation("middle", "%x = f32[2] parameter(0)", middle)
    )
    module = entry(
        "%p = f32[2] parameter(0)",
        "%unknown = f32[2] while(%p), condition=%cond, body=%middle",
        f"ROOT %known = f32[2] while(%p), condition=%cond, body=%middle, {trips(3)}",
        before=before,
    )
    (row,) = products(module)
    assert row.times == (1 + 3) * 5
    assert row.path == "Block_0/Dense_1"
    assert row.instruction == "__cublas$lt$matmul"
    assert (row.operand_dtypes, row.result_dtype) == (("bfloat16", "bfloat16"), "bfloat16")
    assert (row.operand_shapes, row.result_shape) == (((8, 32), (32, 16)), (8, 16))
    assert row.flops == 2 * 8 * 16 * 32


@pytest.mark.parametrize(
    ("written", "changed", "trips"),
    [
        ("", "", 3),  # 1, 3, 5
        ("direction=LT", "direction=NE", 1),
        ("s32[] add(", "s32[] subtract(", 1),
        ("constant(7)", "parameter(9)", 1),
        ("s32[] constant(1)", "s32[] parameter(9)", 1),
        ("constant(7)", "constant(0)", 0),
    ],
)
def test_trips_of_a_counted_loop_without_a_known_count(written, changed, trips):
    """As a TPU writes it: the condition compares a counter that starts and grows by constants."""
    before = computation(
        "cond",
        "%x = (s32[], f32[2]) parameter(0)",
        "%i = s32[] get-tuple-element(%x), index=0",
        "%n = s32[] constant(7)",
        "ROOT %lt = pred[] compare(%i, %n), direction=LT",
    ) + computation(
        "body",
        "%x = (s32[], f32[2]) parameter(0)",
        "%i = s32[] get-tuple-element(%x), index=0",
        "%v = f32[2] get-tuple-element(%x), index=1",
        "%step = s32[] constant(2)",
        "%next = s32[] add(%i, %step)",
        "ROOT %t = (s32[], f32[2]) tuple(%next, %v)",
    )
    lines = (
        "%p = f32[2] parameter(0)",
        "%z = s32[] constant(1)",
        "%s = s32[] copy(%z)",
        "%t = (s32[], f32[2]) tuple(%s, %p)",
        "ROOT %w = (s32[], f32[2]) while(%t), condition=%cond, body=%body",
    )
    lines = [line.replace(written, changed) for line in lines]
    module = entry(*lines, before=before.replace(written, changed))
    assert module.times["body"] == trips


def test_branches_calls_and_fusions_are_entered():
    names = ("one", "two", "three", "four", "five", "six", "never")
    dot = "ROOT %d = bf16[8,16] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    module = entry(
        "%p = f32[2] parameter(0)",
        "%i = f32[2] conditional(%p, %p), branch_computations={%one, %two}",
        "%j = f32[2] conditional(%p, %p), true_computation=%three, false_computation=%four",
        "%k = f32[2] call(%p), to_apply=%five",
        "%l = f32[2] reduce(%p), dimensions={0}, to_apply=%never",
        'ROOT %f = f32[2] fusion(%p), kind=kOutput, calls=%six, metadata={op_name="jit(f)/M/add"}',
        before="".join(computation(name, *_OPERANDS, dot) for name in names),
    )
    rows = products(module)
    assert len(rows) == 6
    assert {row.flops for row in rows} == {2 * 8 * 16 * 32}
    assert [row.path for row in rows].count("M") == 1  # its own op_name is missing
    assert fusions(module) == 1


def flops_of(text, lhs, rhs, result):
    module = entry(f"ROOT %i = f32[2] {text}")
    shapes = [Array("f32", dims) for dims in (lhs, rhs, result)]
    return product_flops(module.computations["main"].root, *shapes)


@pytest.mark.parametrize(
    ("labels", "lhs", "rhs", "result", "flops"),
    [
        # A matmul, and the same batched, as a TPU writes it: a convolution with holes.
        ("dim_labels=bf_io->bf", (8, 32), (32, 16), (8, 16), 2 * 8 * 32 * 16),
        (
            "window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
            *((4, 8, 32), (4, 32, 16), (4, 8, 16), 2 * 4 * 8 * 32 * 16),
        ),
        (
            "window={size=4 stride=4 pad=3_3 lhs_dilate=3 rhs_reversal=1}, dim_labels=0bf_0io->0bf",
            *((4, 8, 32), (4, 32, 16), (4, 8, 16), 2 * 4 * 8 * 32 * 16),
        ),
        # 3x3 over 5x5: the taps that fall on the padding do not count: (3·5 - 2)² places.
        (
            "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
            *((2, 5, 5, 3), (3, 3, 3, 7), (2, 5, 5, 7), 2 * 2 * 3 * 7 * 13 * 13),
        ),
        (
            "window={size=3x3 stride=2x2}, dim_labels=b01f_01io->b01f",
            *((2, 5, 5, 3), (3, 3, 3, 7), (2, 2, 2, 7), 2 * 2 * 3 * 7 * 36),
        ),
    ],
)
def test_convolution_flops(labels, lhs, rhs, result, flops):
    assert flops_of(f"convolution(%a, %b), {labels}", lhs, rhs, result) == flops


def test_three_passes_of_a_cudnn_convolution_cost_the_same():
    image, kernel, output = (2, 5, 5, 3), (7, 3, 3, 3), (2, 5, 5, 7)
    attributes = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f"
    calls = {
        "Forward": (image, kernel, output),
        "BackwardInput": (output, kernel, image),
        "BackwardFilter": (image, output, kernel),
    }
    costs = {
        flops_of(
            f'custom-call(%a, %b), {attributes}, custom_call_target="__cudnn$conv{name}"', *shapes
        )
        for name, shapes in calls.items()
    }
    assert costs == {2 * 2 * 3 * 7 * 13 * 13}


@pytest.mark.parametrize(
    ("text", "shapes", "flops"),
    [
        ("dot(%a, %b), lhs_contracting_dims={0,1}", ((3, 4, 5), (3, 4, 6), (5, 6)), 2 * 360),
        ("custom-call(%a, %b)", ((2, 4, 5), (2, 5, 6), (2, 4, 6)), 2 * 2 * 4 * 5 * 6),
        (
            "ragged-dot(%a, %b), lhs_contracting_dims={1}, lhs_ragged_dims={0}",
            *(((8, 4), (3, 4, 5), (8, 5)), 2 * 8 * 4 * 5),
        ),
        (
            "ragged-dot(%a, %b), lhs_contracting_dims={0}, lhs_ragged_dims={0}",
            *(((8, 4), (8, 5), (3, 4, 5)), 2 * 8 * 4 * 5),
        ),
        (
            'custom-call(%a, %b), custom_call_target="__cudnn$fmhaSoftmax", backend_config='
            '{"fmha_backend_config":{"bmm1_dot_dimension_numbers":'
            '{"lhs_contracting_dimensions":["3"],"lhs_batch_dimensions":["0","1"]}}}',
            *(((2, 3, 16, 8), (2, 3, 32, 8), (2, 3, 16, 8)), 2 * 2 * 2 * 3 * 16 * 32 * 8),
        ),
    ],
)
def test_matmul_flops(text, shapes, flops):
    assert flops_of(text, *shapes) == flops


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1},{2,3}}", 2),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", 8),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups={}", 8),
        ("channel_id=1", 8),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}", 4),
        ("source_target_pairs={{0,1},{1,0},{2,3},{3,2}}", 2),
        ("source_target_pairs={{0,2},{1,3},{2,1}}", 4),
    ],
)
def test_group_size(groups, size):
    module = entry(f"ROOT %r = f32[2] all-reduce(%p), {groups}")
    assert group_size(module.computations["main"].root, 8) == size


def test_collectives_count_once_with_the_bytes_of_the_result():
    module = entry(
        "%p = bf16[8,8] parameter(0)",
        "%s = (bf16[8,8], bf16[32,8]) all-gather-start(%p), replica_groups=[2,2]<=[4]",
        "%d = bf16[32,8] all-gather-done(%s)",
        "%r = (bf16[8,8], f32[4], bf16[8,8]) all-reduce-start(%p, %p, %p), replica_groups={}",
        "%q = ((bf16[8,8]), bf16[2,8]) reduce-scatter-start(%p), replica_groups={}",
        "%c = (f32[4], f32[4], u32[], u32[]) collective-permute-start(%p),"
        " source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
        "%y = ((bf16[4,8]), bf16[4,2], s32[]) async-start(%p), calls=%async",
        "ROOT %z = ((), (), (s32[1])) call-start(), to_apply=%async",
        header="HloModule m, replica_count=1, num_partitions=4",
        before=computation(
            "async",
            "%x = bf16[4,8] parameter(0)",
            "ROOT %a = bf16[4,2] reduce-scatter(%x), replica_groups={}",
        ),
    )
    rows = collectives(module)
    assert [(row.instruction, row.dtype, row.bytes, row.group_size, row.times) for row in rows] == [
        ("reduce-scatter", "bfloat16", 16, 4, 2),
        ("all-gather", "bfloat16", 512, 2, 1),
        ("all-reduce", "bfloat16", 256, 4, 1),
        ("all-reduce", "float32", 16, 4, 1),
        ("reduce-scatter", "bfloat16", 32, 4, 1),
        ("collective-permute", "float32", 16, 4, 1),
    ]


def test_collectives_that_a_tpu_fuses():
    """A gather overlapped with compute is in three kernels; a reduction may keep a slice only."""
    x = "%x = bf16[8] parameter(0)"
    gather = "ROOT %g = bf16[32] all-gather(%x), channel_id=3"
    kernels = "".join(computation(f"k{i}", x, gather) for i in range(3))
    scatter = computation(
        "all-reduce-scatter",
        "%x = f32[32] parameter(0)",
        "%r = f32[32] all-reduce(%x), channel_id=4",
        "ROOT %s = f32[8] dynamic-slice(%r, %x)",
    )
    module = entry(
        "%p = bf16[8] parameter(0)",
        *(f"%f{i} = bf16[8] fusion(%p), calls=%k{i}" for i in range(3)),
        "ROOT %a = f32[8] fusion(%p), calls=%all-reduce-scatter",
        before=scatter + kernels,
    )
    assert [(row.instruction, row.bytes) for row in collectives(module)] == [
        ("reduce-scatter", 32),
        ("all-gather", 64),
    ]


def test_wide_copies_are_converts_without_arithmetic():
    wide, half, brain = "f32[1024,256]", "f16[1024,256]", "bf16[1024,256]"
    before = (
        computation("move", f"%x = {half} parameter(0)", f"ROOT %c = {half} copy(%x)")
        + computation(
            "bare",
            f"%x = {brain} parameter(0)",
            f"%c = {wide} convert(%x)",
            "ROOT %b = f32[256,1024] bitcast(%c)",
        )
        + computation(
            "nested",
            f"%x = {half} parameter(0)",
            f"%c = {half} fusion(%x), calls=%move",
            f"%w = {wide} convert(%c)",
            f"%n = {wide} negate(%w)",
            f"ROOT %t = ({wide}, {wide}) tuple(%n, %w)",
        )
        + computation(
            "rounded",
            f"%x = {wide} parameter(0)",
            f"%c = {brain} convert(%x)",
            f"ROOT %w = {wide} convert(%c)",
        )
    )
    module = entry(
        f"%p = {brain} parameter(0)",
        f"%h = {half} parameter(1)",
        f"%w = {wide} parameter(2)",
        "%s = bf16[8] parameter(3)",
        "%small = f32[8] convert(%s)",
        f'%a = {wide} convert(%p), metadata={{op_name="jit(f)/M/convert_element_type"}}',
        "%b = f32[256,1024] fusion(%p), calls=%bare",
        f"%d = ({wide}, {wide}) fusion(%h), calls=%nested",
        f"ROOT %e = {wide} fusion(%w), calls=%rounded",
        before=before,
    )
    rows = wide_copies(module)
    assert [(row.from_dtype, row.shape, row.path) for row in rows] == [
        ("bfloat16", (1024, 256), "M"),
        ("bfloat16", (256, 1024), ""),
        ("float16", (1024, 256), ""),
    ]
    assert {row.bytes for row in rows} == {1 << 20}


def test_estimated_cycles_are_summed_over_kernels_and_trips():
    def kernel(cycles):
        config = f'{{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
        return f"%f = f32[2] negate(%p), backend_config={config}"

    p = "%p = f32[2] parameter(0)"
    module = entry(
        p,
        kernel(7),
        "ROOT %w = f32[2] while(%p), condition=%cond, body=%body,"
        ' backend_config={"known_trip_count":{"n":"2"}}',
        before=computation("cond", "ROOT %c = pred[] constant(true)")
        + computation("body", p, kernel(10), "ROOT %r = f32[2] copy(%p)"),
    )
    assert estimated_cycles(module) == 7 + 2 * 10
    unknown = kernel(2**63 - 1).replace("%f", "%g")
    assert estimated_cycles(entry(p, kernel(7), unknown, "ROOT %r = f32[2] copy(%p)")) == 7
    assert estimated_cycles(entry("ROOT %p = f32[2] parameter(0)")) is None


def test_traffic_of_a_loop_counts_every_turn_after_the_first():
    """A turn reads a slice of 4 KB and the carry, and updates a slice of a stack in place."""
    p = "%p = f32[1024] parameter(0)"
    state = "(f32[1024], f32[8,1024], f32[8,1024])"
    read = computation(
        "read",
        "%x = f32[1024] parameter(0)",
        "%xs = f32[8,1024] parameter(1)",
        "%i = s32[] parameter(2)",
        "%z = s32[] constant(0)",
        "%s = f32[1,1024] dynamic-slice(%xs, %i, %z), dynamic_slice_sizes={1,1024}",
        "%b = f32[1024] bitcast(%s)",
        "ROOT %a = f32[1024] add(%x, %b)",
    )
    write = computation(
        "write",
        "%ys = f32[8,1024] parameter(0)",
        "%x = f32[1024] parameter(1)",
        "%i = s32[] parameter(2)",
        "%z = s32[] constant(0)",
        "%b = f32[1,1024] bitcast(%x)",
        "ROOT %u = f32[8,1024] dynamic-update-slice(%ys, %b, %i, %z)",
    )
    body = computation(
        "body",
        f"%s = {state} parameter(0)",
        "%x = f32[1024] get-tuple-element(%s), index=0",
        "%xs = f32[8,1024] get-tuple-element(%s), index=1",
        "%ys = f32[8,1024] get-tuple-element(%s), index=2",
        "%i = s32[] constant(0)",
        "%a = f32[1024] fusion(%x, %xs, %i), kind=kLoop, calls=%read",
        "%u = f32[8,1024] fusion(%ys, %a, %i), kind=kLoop, calls=%write",
        f"ROOT %t = {state} tuple(%a, %xs, %u)",
    )
    module = entry(
        p,
        "%xs = f32[8,1024] parameter(1)",
        f"%t = {state} tuple(%p, %xs, %xs)",
        f"ROOT %w = {state} while(%t), condition=%cond, body=%body,"
        ' backend_config={"known_trip_count":{"n":"8"}}',
        before=read + write + body + computation("cond", "ROOT %c = pred[] constant(true)"),
    )
    kernel, index = 4096, 4
    first = 3 * kernel + index  # carry and slice in, carry out
    second = 2 * kernel + index  # carry in, slice out
    assert repeated_bytes(module) == 7 * (first + second)
    assert repeated_bytes(entry("ROOT %p = f32[2] parameter(0)")) == 0


@pytest.mark.parametrize(
    ("op_name", "path"),
    [
        ("jit(call)/call_exported/jit(step)/jvp(GPT)/Block_0/dot_general", "GPT/Block_0"),
        ("jit(step)/transpose(jvp(Block_0))/Dense_1/dot_general", "Block_0/Dense_1"),
        ("jit(step)/transpose(jvp())/add", ""),
        (
            "jit(f)/jvp(M)/while/body/closed_call/checkpoint/rematted_computation/Dense/dot",
            "M/Dense",
        ),
        ("jit(f)/cond/branch_1_fun/Dense/dot", "Dense"),
        ("jit(f)/cond/Dense/dot", "cond/Dense"),
        ("add", ""),
        ("", ""),
    ],
)
def test_op_path(op_name, path):
    assert op_path(op_name) == path
