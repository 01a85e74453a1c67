/* DPS_JOIN(dps_, add, float) is the name dps_add_float: for headers that are included once for each type of numbers. */
#ifndef DPS_JOIN_H
#define DPS_JOIN_H

#define DPS_JOIN_AS_WRITTEN(prefix, name, type) prefix##name##_##type
#define DPS_JOIN(prefix, name, type) DPS_JOIN_AS_WRITTEN(prefix, name, type)

#endif
