"""The parts of FedASMU and FedSSMU: one family of methods."""
