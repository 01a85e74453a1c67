/* DPS_CLONES compiles a function for several generations of processors; the loader chooses one at run time. A module
   may leave a function of a header unused. */
#ifndef DPS_CLONES_H
#define DPS_CLONES_H

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12 && !defined(__SANITIZE_ADDRESS__)
/* v4 has AVX-512, v3 has AVX2. Names of processors would leave out those of other makers. */
#define DPS_CLONES __attribute__((unused, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DPS_CLONES __attribute__((unused))
#endif

#endif
