//! The kernels, as compiled for the host.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A kernel of `host.cpp`, which has the same structure.
#[repr(C)]
pub struct Kernel {
    name: *const c_char,
    params_bytes: usize,
    list_begin: usize,
    run: unsafe extern "C" fn(params: *const c_void, grid: Coordinates, block: Coordinates),
}

// SAFETY: a kernel is never changed after it was registered, and its name is a literal.
unsafe impl Sync for Kernel {}

#[repr(C)]
struct Coordinates {
    x: u32,
    y: u32,
    z: u32,
}

/// Threads of a block, of every kernel.
pub const BLOCK: u32 = 256;

unsafe extern "C" {
    fn software_kernels(found: *mut *const Kernel) -> usize;
    safe fn software_order(seed: u64);
}

/// The number that decides the order of blocks and threads, and how many launches it has decided.
static SEED: AtomicU64 = AtomicU64::new(0);
static LAUNCHES: AtomicU64 = AtomicU64::new(0);
/// An odd number without a pattern, from one launch to the next.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Decides from now on in which order blocks and threads run; 0 for the last first.
pub fn set_seed(seed: u64) {
    SEED.store(seed, Relaxed);
    LAUNCHES.store(0, Relaxed);
}

/// All kernels, which were registered when the library was loaded.
fn all() -> &'static [Kernel] {
    let mut found = std::ptr::null();
    // SAFETY: `found` is room for one pointer.
    let count = unsafe { software_kernels(&raw mut found) };
    // SAFETY: the array is a static one, of so many kernels.
    unsafe { std::slice::from_raw_parts(found, count) }
}

/// The kernel with this name.
pub fn find(name: &str) -> Option<&'static Kernel> {
    all().iter().find(|kernel| kernel.name() == name)
}

impl Kernel {
    pub fn name(&self) -> &'static str {
        // SAFETY: every kernel has a name, a literal.
        let name = unsafe { CStr::from_ptr::<'static>(self.name) };
        name.to_str().unwrap_or("")
    }

    /// Size of the parameter that it takes.
    pub fn params_bytes(&self) -> usize {
        self.params_bytes
    }

    /// The words of a parameter that may be addresses: those before a list of numbers, of which two beside each other
    /// could look like one.
    pub fn addresses<'a>(&self, params: &'a [u128]) -> impl Iterator<Item = usize> + 'a {
        let words = params.iter().flat_map(|pair| {
            let bytes = pair.to_ne_bytes();
            [0, 8].map(|at| bytes[at..at + 8].try_into().map_or(0, usize::from_ne_bytes))
        });
        words.take(self.list_begin / size_of::<usize>())
    }

    /// Runs it on a parameter of its size.
    pub fn run(&self, params: &[u128], [x, y]: [u32; 2]) {
        let (seed, launch) = (SEED.load(Relaxed), LAUNCHES.fetch_add(1, Relaxed));
        software_order(if seed == 0 { 0 } else { seed.wrapping_add(STEP.wrapping_mul(launch + 1)).max(1) });
        let (grid, block) = (Coordinates { x, y, z: 1 }, Coordinates { x: BLOCK, y: 1, z: 1 });
        // SAFETY: the parameter has the size that the kernel takes; what it points to is the launcher's business, as
        // on a device, and device memory is open.
        unsafe { (self.run)(params.as_ptr().cast(), grid, block) };
    }
}
