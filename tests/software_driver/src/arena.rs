//! Address ranges that are used once: what is given back stays reserved, and whoever touches it dies.

use std::ffi::c_void;
use std::process::abort;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

/// Addresses that one reservation takes; no memory stands behind them.
const RESERVED: usize = 1 << 40;
/// The most bytes that the pattern file holds; larger blocks map it again and again.
const PATTERN_BYTES: usize = 16 << 20;
/// Blocks that are at least so large lie as large pages do.
const LARGE_PAGE: usize = 2 << 20;
/// Blocks up to this size may be made of large pages, which are opened and closed faster. Larger ones may be meant to
/// be used here and there only, where large pages would take memory for what lies between.
const MOST_LARGE_PAGES: usize = 256 << 20;
/// The byte that memory holds before anybody writes it.
pub const FRESH: u8 = 0xA5;
pub const PAGE: usize = 4096;
/// The alignment of every address that is handed out, as a driver has it at least. More would hide that somebody needs
/// more.
const ALIGNMENT: usize = 256;

/// A copy of standard error as it was when the library was loaded, or -1. A test runner redirects it later on, to a
/// file that nobody reads once the process is gone.
static STDERR: AtomicI32 = AtomicI32::new(-1);

extern "C" fn keep_stderr() {
    // SAFETY: copying a descriptor touches no memory; without one there is none to copy.
    STDERR.store(unsafe { libc::fcntl(libc::STDERR_FILENO, libc::F_DUPFD_CLOEXEC, 3) }, Relaxed);
}

// SAFETY: the loader calls what stands in this section, and this function needs nothing that is set up later.
#[used]
#[unsafe(link_section = ".init_array")]
static KEEP_STDERR: extern "C" fn() = keep_stderr;

/// Says why the process cannot go on, and ends it.
pub fn fatal(message: &str) -> ! {
    let line = format!("software driver: {message}\n");
    // SAFETY: the bytes are those of a string. Nothing can be done if they cannot be written.
    unsafe { libc::write(STDERR.load(Relaxed), line.as_ptr().cast(), line.len()) };
    abort()
}

/// A file full of [`FRESH`], which blocks map privately, so that they cost memory only where they are written.
struct Pattern {
    file: libc::c_int,
    len: usize,
}

impl Pattern {
    fn new() -> Self {
        // SAFETY: the name is a string that ends with a zero.
        let file = unsafe { libc::memfd_create(c"fresh device memory".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            fatal("no file for the pattern of fresh memory");
        }
        Self { file, len: 0 }
    }

    /// Makes sure that it holds `len` bytes, or as many as it may.
    fn fill(&mut self, len: usize) {
        let bytes = [FRESH; PAGE];
        while self.len < len.min(PATTERN_BYTES) {
            // SAFETY: the source is an array of so many bytes.
            let written = unsafe { libc::write(self.file, bytes.as_ptr().cast(), bytes.len()) };
            match usize::try_from(written) {
                Ok(written) if written == bytes.len() => self.len += written,
                _ => fatal("the pattern of fresh memory cannot be written"),
            }
        }
    }
}

/// A range of addresses, of which `used` were handed out.
struct Reservation {
    start: usize,
    len: usize,
    used: usize,
}

/// Blocks of memory at addresses that come only once, each with an untouchable page behind it.
pub struct Arena {
    reservations: Vec<Reservation>,
    pattern: Pattern,
}

/// The pages around a block that ends where they do, up to alignment.
fn pages(start: usize, len: usize) -> (usize, usize) {
    let first = start / PAGE * PAGE;
    (first, (start + len).next_multiple_of(PAGE) - first)
}

impl Arena {
    pub fn new() -> Self {
        Self { reservations: Vec::new(), pattern: Pattern::new() }
    }

    /// Whether an address belongs to a block, given back or not.
    pub fn has(&self, address: usize) -> bool {
        self.reservations.iter().any(|held| (held.start..held.start + held.used).contains(&address))
    }

    /// A block of `len` bytes, all [`FRESH`], that may be touched if `is_open`. `None` if there are no addresses.
    ///
    /// It ends at the end of a page, so that the first bytes beyond it cannot be touched.
    pub fn take(&mut self, len: usize, is_open: bool) -> Option<usize> {
        let bytes = len.max(1).checked_next_multiple_of(ALIGNMENT)?;
        let mapped = bytes.checked_next_multiple_of(PAGE)?;
        let first = self.addresses(mapped.checked_add(PAGE)?)?;
        self.pattern.fill(mapped);
        let protection = if is_open { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
        let mut at = 0;
        while at < mapped {
            let part = (mapped - at).min(PATTERN_BYTES);
            place(first + at, part, protection, Some(self.pattern.file));
            at += part;
        }
        Some(first + mapped - bytes)
    }

    /// Gives a block back; its addresses stay reserved.
    pub fn give_back(start: usize, len: usize) {
        let (first, mapped) = pages(start, len.max(1).next_multiple_of(ALIGNMENT));
        place(first, mapped, libc::PROT_NONE, None);
    }

    /// Lets a block be touched, or not.
    pub fn protect(start: usize, len: usize, is_open: bool) {
        let (first, mapped) = pages(start, len.max(1).next_multiple_of(ALIGNMENT));
        let protection = if is_open { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
        // SAFETY: the pages are those of a block of ours. Who touches it while it is closed is meant to die.
        if unsafe { libc::mprotect(first as *mut c_void, mapped, protection) } != 0 {
            fatal("device memory cannot be opened or closed");
        }
    }

    /// Zeroes whole pages of an open block without touching them.
    pub fn zero_pages(first: usize, len: usize) {
        place(first, len, libc::PROT_READ | libc::PROT_WRITE, None);
        let advice = if len <= MOST_LARGE_PAGES { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: the pages were mapped just now. It is advice, so it does not matter whether it is taken.
        unsafe { libc::madvise(first as *mut c_void, len, advice) };
    }

    fn addresses(&mut self, len: usize) -> Option<usize> {
        let alignment = if len < LARGE_PAGE { PAGE } else { LARGE_PAGE };
        // The place where it would begin, counted from the beginning of a reservation.
        let offset = |held: &Reservation| (held.start + held.used).next_multiple_of(alignment) - held.start;
        let has_room = |held: &Reservation| held.len.saturating_sub(offset(held)) >= len;
        if !self.reservations.last().is_some_and(has_room) {
            self.reservations.push(reserve(len.checked_add(alignment)?)?);
        }
        let held = self.reservations.last_mut()?;
        let offset = offset(held);
        held.used = offset + len;
        Some(held.start + offset)
    }
}

/// Reserves addresses for at least `len` bytes: many, where the process may have them.
fn reserve(len: usize) -> Option<Reservation> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let mut wanted = RESERVED.max(len.checked_next_multiple_of(PAGE)?);
    while wanted >= len {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing.
        let start = unsafe { libc::mmap(ptr::null_mut(), wanted, libc::PROT_NONE, flags, -1, 0) };
        if start != libc::MAP_FAILED {
            return Some(Reservation { start: start as usize, len: wanted, used: 0 });
        }
        wanted /= 2;
    }
    None
}

/// Maps pages of a reservation anew: of the pattern file, or empty.
fn place(first: usize, len: usize, protection: libc::c_int, file: Option<libc::c_int>) {
    let anonymous = if file.is_none() { libc::MAP_ANONYMOUS } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE | anonymous;
    // SAFETY: the pages belong to a reservation of ours, and what was there is meant to go.
    let placed = unsafe { libc::mmap(first as *mut c_void, len, protection, flags, file.unwrap_or(-1), 0) };
    if placed == libc::MAP_FAILED {
        fatal("memory cannot be mapped");
    }
}
