"""The parts that FedASMU and FedSSMU share."""
