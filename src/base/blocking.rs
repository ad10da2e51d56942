//! Sections in which a thread waits.

use std::sync::OnceLock;

/// Runs a section in which the thread may wait, such as without the lock of an interpreter.
pub type Section = fn(section: &mut (dyn FnMut() + Send));

static SECTION: OnceLock<Section> = OnceLock::new();

/// Has every later [`blocking`] of this process run by `section`. The first one stays.
pub fn on_blocking(section: Section) {
    let _ = SECTION.set(section);
}

/// Does `wait`, which may take long: for a device or for another thread. The caller holds no lock.
///
/// ```
/// use kvpool::base::blocking;
/// let (sender, receiver) = std::sync::mpsc::channel();
/// std::thread::spawn(move || sender.send(7));
/// assert_eq!(blocking(move || receiver.recv()), Ok(7));
/// ```
pub fn blocking<T: Send>(wait: impl FnOnce() -> T + Send) -> T {
    let Some(section) = SECTION.get() else { return wait() };
    let (mut wait, mut answer) = (Some(wait), None);
    section(&mut || answer = wait.take().map(|wait| wait()));
    answer.expect("a section runs its body once")
}
