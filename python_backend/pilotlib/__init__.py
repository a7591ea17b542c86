"""What the Python backends share. Runs inside Triton's stub processes: light imports only, microseconds count."""
