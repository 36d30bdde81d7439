"""How long a test waits for what must happen."""

PATIENCE = 600.0  # seconds: a busy machine is slow, and only a process that hangs takes so long
