"""Which parameter a matmul or convolution belongs to."""

from collections.abc import Collection, Iterable, Sequence

from jaxmp._dataflow import Node, unmoved

_KEEPS_IDENTITY = frozenset({"convert_element_type", "reduce_precision"})


def origin(node: Node) -> Node:
    """Returns what a value was before it was cast and moved."""
    while True:
        node = unmoved(node)
        if node.primitive not in _KEEPS_IDENTITY:
            return node
        node = node.operands[0]


def parameter_names(
    products: Iterable[tuple[Node, str]], input_names: Sequence[str], states: Collection[int]
) -> dict[int, str]:
    """Returns the names of the inputs that products multiply with, by the products' ids.

    The forward product and the gradient of the activation have the parameter as an operand. The
    gradient of the parameter has none; it shares its cotangent with the gradient of the activation,
    and its activation with the forward product.

    Args:
        products: pairs of a product and its pass.
        input_names: of the program's inputs.
        states: positions of the inputs that come out again; of two inputs that are multiplied with
            each other that is the parameter, else the right one.
    """
    names: dict[int, str] = {}
    by_partner: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    gradients = []
    for node, pass_name in products:
        operands = [origin(operand) for operand in node.operands[:2]]
        if pass_name == "wgrad":
            gradients.append((node, operands))
            continue
        inputs = [
            (operand.index in states, side)
            for side, operand in enumerate(operands)
            if operand.kind == "input"
        ]
        if inputs:
            _, side = max(inputs)
            name = names[id(node)] = input_names[operands[side].index]
            by_partner.setdefault(id(operands[1 - side]), []).append((name, operands[side].shape))
    for node, operands in gradients:
        found = [by_partner.get(id(operand), []) for operand in operands]
        # The cotangent belongs to one product only, an activation may feed several.
        for candidates in sorted(filter(None, found), key=len):
            alike = {name for name, shape in candidates if _same_sizes(shape, node.shape)}
            if len(alike) == 1:
                names[id(node)] = alike.pop()
                break
    return names


def _same_sizes(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether arrays have the same axes, in any order: a gradient is transposed after its product.

    A parameter that is scanned over has one axis more.
    """
    sizes, others = sorted(shape), sorted(other)
    if len(sizes) == len(others) + 1:
        return any(sizes[:i] + sizes[i + 1 :] == others for i in range(len(sizes)))
    return sizes == others
