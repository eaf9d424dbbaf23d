"""An engine's processes: started, watched, replaced."""
