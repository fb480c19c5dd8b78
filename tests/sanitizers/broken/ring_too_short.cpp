// AddressSanitizer must report this: the last slot of a ring has a byte too few.
#define MISSING_BYTES 1
#include "../shared.cpp"
