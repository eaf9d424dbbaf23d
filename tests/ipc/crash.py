"""A peer that dies, without a process of its own."""


def crash(end):
    """Do to an end of a ring what the kernel does when its process is killed: free its locks."""
    # What an end's own `close` does first, telling its readers, is what a killed process leaves out.
    ring = getattr(end._ring, "ring", end._ring)  # noqa: SLF001
    ring.close()
