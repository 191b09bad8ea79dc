"""Videos of one object on a plain background: does it move as its caption says? Measured from the pixels."""
