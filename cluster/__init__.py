"""What starts Ray clusters for raysharding; no part of the library."""
