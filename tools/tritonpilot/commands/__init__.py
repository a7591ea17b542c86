"""Commands that are more than a few lines: one module each, registered in tritonpilot.cli."""
