"""CPU kernels: C++ compiled at first use, and chunked torch forms where no compiler is found."""
