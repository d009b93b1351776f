"""What is drawn and written of the results. `words` needs no matplotlib."""
