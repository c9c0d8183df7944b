// build/test_unit: one process, which starts no MPI. See test/main.cc.
extern const bool under_mpi = false;
