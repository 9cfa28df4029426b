"""The batteries: all contracts of a method, and those of a transport."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfgradcomp import methods as papers
from tfgradcomp.collectives import Loopback
from tfgradcomp.compressors import TopK
from tfgradcomp.core import Layout
from tfgradcomp.core.arguments import check_choice, check_instance
from tfgradcomp.methods import Method
from tfgradcomp.testing import compressor_contracts as compressors
from tfgradcomp.testing import promises as kept_promises
from tfgradcomp.testing import server_contracts as servers
from tfgradcomp.testing.errors import ContractError, require
from tfgradcomp.testing.exchanges import (
    MakeTransport,
    exchanges_give_the_bits_of_a_direct_exchange,
)
from tfgradcomp.testing.inputs import LAYOUTS

PROMISES = (None, "unbiased", "contracting")
# Blocks of one size, but for the last; shards are cut between them and inside.
_SHARDS = Layout.from_sizes([2400, 7], 512)
_EXCHANGED = {1: LAYOUTS["tensors"], 2: LAYOUTS["buckets"], 3: _SHARDS}


def check_method(
    method: Method,
    promises: str | None = None,
    target: kept_promises.Target = lambda x, layout: x,
    largest: float = 1e30,
) -> None:
    """Checks the contracts that every method keeps.

    Gradients are synthetic, of at most 2407 elements. Workers, one to three of them,
    are threads of this process. A method takes some seconds.

    Args:
        method: The method.
        promises: `"unbiased"`: the mean of decoded payloads is the target.
            `"contracting"`: a payload loses less than the target, in squared length and
            on average. None: neither.
        target: Function from the gradient of a first step and the layout to the vector
            that the payload stands for, such as the clipped gradient. By default the
            gradient.
        largest: The largest magnitude for which everything must stay finite.

    Raises:
        ContractError: If the method breaks a contract. The message names the contract
            and shows numbers.
        ValueError: If an argument is out of range.

    Example:
        ```python
        tfgradcomp.testing.check_method(tfgradcomp.methods.qsgd(), "unbiased")
        ```
    """
    check_instance("method", method, Method)
    check_choice("promises", promises, PROMISES)
    for layout in LAYOUTS.values():
        _hold(compressors.payloads_are_as_declared_and_survive_the_wire, method, layout)
        _hold(compressors.every_form_gives_the_same_bits, method, layout)
        _hold(compressors.the_first_round_is_as_declared, method, layout)
        _hold(compressors.decoded_vectors_do_not_depend_on_tensor_sizes, method, layout)
        _hold(compressors.infinities_and_nan_are_flagged, method, layout)
        if promises == "contracting":
            keep = kept_promises.payloads_keep_a_part_of_the_gradient
            _hold(keep, method, layout, target)
    for name in ("one", "tensors"):
        layout = LAYOUTS[name]
        _hold(compressors.extreme_values_stay_finite, method, layout, largest)
        native = compressors.native_operations_give_the_bits_of_pure_tensorflow
        _hold(native, method, layout)
    if promises == "unbiased":
        _hold(kept_promises.decoded_payloads_are_unbiased, method, target)
    _hold(compressors.steps_can_be_traced, method, LAYOUTS["tensors"])
    _hold(configurations_restore_the_method, method)
    for num_workers, layout in _EXCHANGED.items():
        _hold(servers.replies_are_as_declared_and_survive_the_wire, method, num_workers)
        _hold(servers.updates_are_decoded_replies, method, num_workers)
        exchange = exchanges_give_the_bits_of_a_direct_exchange
        _hold(exchange, method, layout, num_workers)


def check_transport(
    transport: MakeTransport, methods: Sequence[Method] | None = None
) -> None:
    """Checks the contracts that every transport keeps.

    The transport gives the bits of a direct exchange, passes flags on, moves what its
    routes declare, joins and divides the server's state, and refuses the methods that
    it does not support. Workers, one to three of them, are threads of this process.

    Args:
        transport: The class of the transport, or a function of a worker's collectives.
        methods: The methods. None: methods of this package with all kinds of fields.

    Raises:
        ContractError: If the transport breaks a contract. The message names the
            contract and shows numbers.

    Example:
        ```python
        tfgradcomp.testing.check_transport(tfgradcomp.transports.Sharded)
        ```
    """
    name, carried = getattr(transport, "__name__", "the transport"), 0
    for method in _varied_methods() if methods is None else methods:
        for layout in (LAYOUTS["one"], LAYOUTS["buckets"], _SHARDS):
            alone = transport(Loopback(1).collectives(0))
            if not alone.supports(method.fused(), layout):
                _hold(unsupported_methods_are_refused, method, layout, transport)
                continue
            carried += 1
            for count in _EXCHANGED:
                exchange = exchanges_give_the_bits_of_a_direct_exchange
                _hold(exchange, method, layout, count, {name: transport})
    require(carried, f"{name} must support one of the methods. Received: {methods}")


def configurations_restore_the_method(method: Method) -> None:
    """Checks that a method is equal to the method that its configuration describes."""
    config = json.dumps(keras.saving.serialize_keras_object(method))
    restored = keras.saving.deserialize_keras_object(json.loads(config))
    require(restored == method, f"methods must be equal. Received: restored={restored}")


def unsupported_methods_are_refused(
    method: Method, layout: Layout, transport: MakeTransport
) -> None:
    """Checks that `bind` raises an error where `supports` returns False."""
    try:
        transport(Loopback(1).collectives(0)).bind(method, layout, "site")
    except ValueError:
        return
    raise ContractError("`bind` must raise ValueError, as `supports` returns False.")


def _hold(contract: Callable, method: Method, *arguments: Any) -> None:
    """Checks a contract; an error names the contract, the method and the arguments."""
    try:
        contract(method, *arguments)
    except Exception as error:
        statement = contract.__name__.replace("_", " ")
        kind = "" if isinstance(error, ContractError) else f"{type(error).__name__}: "
        raise ContractError(
            f"Broken contract: {statement}. {kind}{error}\n"
            f"Checked: method={method}, with {', '.join(map(str, arguments))}"
        ) from error


@functools.cache
def _varied_methods() -> list[Method]:
    """Methods with all kinds of fields: codes, numbers, sums, a varying length."""
    return [
        papers.terngrad(),
        papers.signsgd(),
        papers.dist_ef_sgd(),
        papers.dist_ef_sgd(TopK(0.1)),
        papers.orq(levels=5, reply="requantize"),
        papers.half_precision(),
        papers.variance_based(),
        papers.strom("auto"),
    ]
