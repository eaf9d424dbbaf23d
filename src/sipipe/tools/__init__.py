"""Tools that a person runs beside an engine; nothing of an engine imports them."""
