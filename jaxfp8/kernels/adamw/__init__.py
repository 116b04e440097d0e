"""AdamW with stored moments, in one read and one write of weights and states."""
