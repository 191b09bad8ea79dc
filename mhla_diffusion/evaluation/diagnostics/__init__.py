"""What attention matrices are like: rank, entropy and mixing coefficients, without N x N numbers in memory."""
