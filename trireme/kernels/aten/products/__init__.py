"""Matrix products: large tiles, and few rows that a matrix is streamed past. Knows which of them are faster as torch has them."""
