"""Everything that crosses processes: headers, steps, boot records, addresses."""
