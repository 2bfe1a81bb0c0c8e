// The rank's side of bench_step: trains when its team (team.h) asks for it, and answers with the times.
//
// [Note: what a team and its ranks say] Lines of text over the rank's stdin and stdout. The rank begins with
// "ready". To "train N" it answers N times five numbers, the seconds of a StepTimes; to "footprint" with the
// numbers of a Footprint. The end of stdin ends it.
#pragma once

#include "benchmarks/trainee.h"

namespace tessera::benchmarks {

/// Collective, but in the modes that train alone. Returns when stdin ends. Throws what training throws.
void serve(const Task& task);

}  // namespace tessera::benchmarks
