"""The transport of workers that do not wait for each other."""

from __future__ import annotations

from tfgradcomp.parameter_server.push_log import PushLog
from tfgradcomp.parameter_server.push_route import LogCollectives, PushLogRoute
from tfgradcomp.parameter_server.push_stepper import PushLogStepper
from tfgradcomp.parameter_server.transport import ParameterServer


class PushLogTransport(ParameterServer):
    """Pushes gradients to the parameter servers without a barrier, into a `PushLog`."""

    route_class = PushLogRoute
    carries_plain = True
    collectives_class = LogCollectives
    channel_class = PushLog
    stepper_class = PushLogStepper
