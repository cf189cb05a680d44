"""Exclusive use of a device, by one of the threads that share it."""

import threading

# A program that runs for the first time loads its kernels, and cuDNN's do not survive it that
# another thread copies to the GPU meanwhile: "capturing stream has unjoined work", in most runs.
# So whoever runs a program for the first time holds this, and so does whoever copies.
EXCLUSIVE = threading.RLock()
