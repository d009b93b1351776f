//
// The formula, the checks and the host function[% if kind == "cpp" %]; [[ name ]].cpp and [[ name ]].cu compile them for their device[% endif %].
#pragma once

