// The two Mach integer types in metal-cpp's resource class.
#pragma once

typedef int kern_return_t;
typedef unsigned int task_id_token_t;
