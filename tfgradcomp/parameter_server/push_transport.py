"""The transport of workers that wait for nobody."""

from __future__ import annotations

from typing_extensions import override

from tfgradcomp.parameter_server.push_log import PushLog
from tfgradcomp.parameter_server.push_route import LogCollectives, PushLogRoute
from tfgradcomp.parameter_server.push_stepper import PushLogStepper
from tfgradcomp.parameter_server.transport import ParameterServer


class PushLogTransport(ParameterServer):
    """Pushes to the parameter servers without a barrier; see `PushLog`."""

    route_class = PushLogRoute
    carries_plain = True
    channel_class = PushLog
    stepper_class = PushLogStepper

    @classmethod
    @override
    def at(cls, channel, rank):
        return cls(LogCollectives(channel, rank))
