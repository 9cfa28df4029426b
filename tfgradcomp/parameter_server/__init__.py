"""Training with parameter servers: weights stay on the workers, words travel."""

from tfgradcomp.parameter_server.push_stepper import PushLogTransport
from tfgradcomp.parameter_server.trainer import ParameterServerTrainer
from tfgradcomp.parameter_server.transport import ParameterServer

__all__ = ["ParameterServer", "ParameterServerTrainer", "PushLogTransport"]
