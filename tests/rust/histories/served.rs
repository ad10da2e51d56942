//! A store in memory, answered by threads, perhaps badly.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use kvpool::pool::{RemoteStore, StoreCall, StoreCallKind, StoreCallQueue};

type Pieces = HashMap<[u8; 32], Vec<u8>>;

/// A store that has everything that it was given, unless it `fails`.
pub(super) struct AnsweringStore {
    pub(super) store: Arc<RemoteStore>,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    pieces: Mutex<Pieces>,
    fails: bool,
    calls: AtomicUsize,
}

impl Shared {
    fn pieces(&self) -> MutexGuard<'_, Pieces> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the store refuses requests at present.
    fn fails(&self) -> bool {
        self.fails && self.calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(5)
    }

    fn answer(&self, call: StoreCall) {
        let mut answers = Vec::new();
        for (at, key) in call.keys().iter().enumerate() {
            let row = |rows: &kvpool::memory::HostRows| vec![0xee; rows.bytes_of(at)];
            let known = self.pieces().get(key).cloned();
            answers.push(match (call.kind(), call.rows()) {
                (StoreCallKind::Write, Some(rows)) if !self.fails() => {
                    let mut bytes = row(rows);
                    rows.read(at, &mut bytes);
                    let before = self.pieces().insert(*key, bytes.clone());
                    // A key names its bytes.
                    assert!(before.is_none_or(|before| before == bytes), "two pieces have one key");
                    true
                }
                (StoreCallKind::Read, Some(rows)) => {
                    let is_right = known.is_some() && !self.fails();
                    rows.write(at, &known.filter(|_| is_right).unwrap_or_else(|| row(rows)));
                    is_right
                }
                (StoreCallKind::Find, _) => known.is_some() != self.fails(),
                _ => false,
            });
        }
        call.finish(&answers);
    }
}

impl AnsweringStore {
    pub(super) fn new(fails: bool) -> Self {
        let store = Arc::<RemoteStore>::default();
        let shared = Arc::new(Shared { pieces: Mutex::default(), fails, calls: AtomicUsize::new(0) });
        let serve = |queue| {
            let (store, shared) = (Arc::clone(&store), Arc::clone(&shared));
            std::thread::spawn(move || {
                while let Ok(call) = store.next(queue, Duration::MAX) {
                    if let Some(call) = call {
                        shared.answer(call);
                    }
                }
            })
        };
        let threads = [StoreCallQueue::Reads, StoreCallQueue::Writes].map(serve).into();
        Self { store, shared, threads }
    }

    pub(super) fn fails(&self) -> bool {
        self.shared.fails
    }
}

impl Drop for AnsweringStore {
    fn drop(&mut self) {
        self.store.abandon();
        for thread in self.threads.drain(..) {
            let served = thread.join();
            assert!(served.is_ok() || std::thread::panicking(), "the store has answered");
        }
    }
}
