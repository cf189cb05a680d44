"""What a trained model does: its loss on text it has not seen, and the text it writes."""
