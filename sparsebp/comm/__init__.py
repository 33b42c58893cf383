"""Transports that carry arrays between ranks: threads of one process, processes of MPI, GPUs with NCCL."""
