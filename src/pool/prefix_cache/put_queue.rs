//! The pieces of a tier on their way to the store below.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::base::lock_order::{LockRank, RankedMutex};
use crate::base::{ForkGate, KeySet, run_blocking};
use crate::cache::{PageHash, UsedRun};
use crate::pool::StoreTransfer;
use crate::pool::host_tier::{OutgoingPieces, PieceKind, StoringCount};
use crate::transfer::JobThread;

use super::store_access::StoreAccess;

/// The maximum time from the moment when a store has released the memory of pieces until it says which of them
/// it has stored.
const ANSWER_TIME: Duration = Duration::from_secs(1);

/// Puts pieces of a tier in a store, in order and as many at a time as the tier may keep for it. Pieces beyond
/// that wait. A piece that the store did not take is put again when the store takes others, or when it is used
/// the next time.
#[derive(Debug)]
pub(super) struct PutQueue {
    store_access: Arc<StoreAccess>,
    /// The thread that waits for copies to the tier, and then computes the names of their pieces and puts
    /// them in the store. Calls of the cache would take too long if they did this.
    thread: Arc<JobThread>,
    state: RankedMutex<WaitingPieces>,
    /// Whether the thread is about to record uses, or records them.
    is_recording: AtomicBool,
}

#[derive(Debug, Default)]
struct WaitingPieces {
    /// The pieces that wait, by kind, in the order in which they are put.
    waiting: [VecDeque<PageHash>; 2],
    /// The pieces that wait or are being put.
    listed: [KeySet<PageHash>; 2],
    /// The puts that are not known to be over.
    puts: Vec<Put>,
}

/// A put in progress.
#[derive(Debug)]
struct Put {
    kind: PieceKind,
    keys: Vec<PageHash>,
    transfer: Arc<StoreTransfer>,
    /// Whether the store is done with the memory of the pieces.
    is_released: Arc<AtomicBool>,
    /// Counts the pieces until it is known which of them are stored.
    _storing: StoringCount,
}

/// Pieces that a store reads. When it is done with them, more are sent.
#[derive(Debug)]
struct SentPieces {
    outgoing: Option<OutgoingPieces>,
    is_released: Arc<AtomicBool>,
    queue: Weak<PutQueue>,
    thread: Arc<JobThread>,
}

impl Drop for SentPieces {
    fn drop(&mut self) {
        drop(self.outgoing.take());
        self.is_released.store(true, Ordering::Release);
        let (queue, _gate) = (self.queue.clone(), ForkGate::enter_on_own_thread());
        // A thread of the store must not become the last owner of the store.
        let send = move || queue.upgrade().iter().for_each(|queue| queue.send_waiting(false));
        // Without a thread, the next pieces try again.
        let _ = self.thread.submit(send);
    }
}

impl PutQueue {
    pub(super) fn new(store_access: &Arc<StoreAccess>) -> Self {
        Self {
            store_access: Arc::clone(store_access),
            thread: Arc::new(JobThread::new("kvpool-put")),
            state: RankedMutex::new(LockRank::WaitingPieces, WaitingPieces::default()),
            is_recording: AtomicBool::new(false),
        }
    }

    pub(super) fn thread(&self) -> &JobThread {
        &self.thread
    }

    /// Adds pieces that are complete in the tier. Call [`Self::send`] then.
    pub(super) fn add(&self, kind: PieceKind, keys: &[PageHash]) {
        // All are counted first: the thread may take a piece as soon as it waits.
        self.store_access.tier().change_waiting(keys.len(), 0);
        let added = self.with_state(|state| state.add(kind, keys));
        self.store_access.tier().change_waiting(0, keys.len() - added);
    }

    /// Has the thread send pieces that wait, if the store can take some.
    pub(super) fn send(self: &Arc<Self>) {
        let queue = Arc::clone(self);
        if self.thread.submit(move || queue.send_waiting(false)).is_err() {
            self.give_up_waiting();
        }
    }

    /// Waits until every piece was passed to the store.
    pub(super) fn finish(self: &Arc<Self>) {
        let (sender, given) = std::sync::mpsc::channel::<()>();
        let queue = Arc::clone(self);
        let send_all = move || {
            queue.send_waiting(true);
            drop(sender);
        };
        // When the job is done or dropped, its end of the channel is dropped.
        if self.thread.submit(send_all).is_err() {
            self.give_up_waiting();
        }
        let _ = run_blocking(move || given.recv());
    }

    /// Has the thread record uses of runs in the store, unless it is recording others. A run comes before the
    /// run that it follows.
    pub(super) fn record_uses(self: &Arc<Self>, used: impl FnOnce() -> Vec<UsedRun>) {
        if self.is_recording.swap(true, Ordering::AcqRel) {
            return;
        }
        let (queue, used) = (Arc::clone(self), used());
        let is_none = used.is_empty();
        let record = move || {
            queue.touch(&used);
            queue.is_recording.store(false, Ordering::Release);
        };
        if is_none || self.thread.submit(record).is_err() {
            self.is_recording.store(false, Ordering::Release);
        }
    }

    /// Records uses of runs, and lets pieces wait that the tier has and the store lacks.
    fn touch(self: &Arc<Self>, used: &[UsedRun]) {
        let mut missing = [Vec::new(), Vec::new()];
        for UsedRun { pages, state } in used {
            for (kind, keys) in [(PieceKind::Page, &pages[..]), (PieceKind::State, state.as_slice())] {
                // A store that fails reports it itself.
                let Ok(present) = self.store_access.touch(kind, keys) else { return };
                let absent = keys.iter().zip(present).filter(|(_, is_there)| !is_there);
                missing[kind as usize].push(absent.map(|(key, _)| *key).collect::<Vec<_>>());
            }
        }
        for kind in PieceKind::ALL {
            // The beginning of a prefix is put first.
            let keys = std::mem::take(&mut missing[kind as usize]).into_iter().rev().flatten().collect();
            self.add(kind, &self.store_access.tier().complete_of(kind, keys));
        }
        self.send_waiting(false);
    }

    /// Sends pieces that wait: as many as the tier may keep for the store, or all.
    fn send_waiting(self: &Arc<Self>, is_last: bool) {
        for kind in PieceKind::ALL {
            self.end_puts(kind, is_last);
            // Pieces that the tier has evicted leave room for others, and no put of them ends later.
            while self.send_some(kind, if is_last { usize::MAX } else { self.room(kind) }) {}
        }
    }

    /// Returns how many more pieces of a kind may be sent. Puts of an earlier cache of the tier do not count: their end is
    /// told to the queue of that cache alone.
    fn room(&self, kind: PieceKind) -> usize {
        let max = self.store_access.tier().max_sent(kind);
        max.saturating_sub(self.with_state(|state| state.being_put(kind)))
    }

    /// Sends up to `room` of the pieces that wait. Returns whether there were any.
    fn send_some(self: &Arc<Self>, kind: PieceKind, room: usize) -> bool {
        let tier = self.store_access.tier();
        // Counts until the pieces that are sent do.
        let _sending = tier.begin_sending();
        let keys = self.with_state(|state| state.take(kind, room));
        if keys.is_empty() {
            return false;
        }
        tier.change_waiting(0, keys.len());
        let (found, outgoing, storing) = tier.send_out(kind, &keys);
        // The tier has evicted the others before they could be sent.
        let mut next = found.iter().peekable();
        let gone: Vec<_> = keys.into_iter().filter(|key| next.next_if_eq(&key).is_none()).collect();
        self.give_up(kind, &gone);
        if found.is_empty() {
            return true;
        }
        let (ranges, queue, is_released) =
            (outgoing.ranges(), Arc::downgrade(self), Arc::new(AtomicBool::new(false)));
        let sent = SentPieces {
            outgoing: Some(outgoing),
            is_released: Arc::clone(&is_released),
            queue,
            thread: Arc::clone(&self.thread),
        };
        match self.store_access.put(kind, &found, &ranges, Arc::new(sent)) {
            Ok(transfer) => self.with_state(|state| {
                state.puts.push(Put { kind, keys: found, transfer, is_released, _storing: storing });
            }),
            Err(_) => self.give_up(kind, &found),
        }
        true
    }

    /// Ends the puts that are over. Pieces that the store did not take wait again, if it took others of the
    /// same put; if it took none, it would take none now.
    fn end_puts(&self, kind: PieceKind, is_last: bool) {
        let puts = self.with_state(|state| std::mem::take(&mut state.puts));
        for put in puts {
            let is_of_kind = put.kind == kind;
            if is_of_kind && put.is_released.load(Ordering::Acquire) {
                // What is left is to say which pieces are stored.
                let _ = put.transfer.wait(ANSWER_TIME);
            }
            let stored = is_of_kind.then(|| self.store_access.stored(kind, &put.transfer)).flatten();
            let Some(stored) = stored else {
                self.with_state(|state| state.puts.push(put));
                continue;
            };
            let took_some = stored.contains(&true);
            let (taken, left): (Vec<_>, Vec<_>) = put.keys.into_iter().zip(stored).partition(|(_, is)| *is);
            let left: Vec<PageHash> = left.into_iter().map(|(key, _)| key).collect();
            self.with_state(|state| {
                for (key, _) in &taken {
                    state.listed[kind as usize].remove(key);
                }
            });
            if took_some && !is_last {
                self.store_access.tier().change_waiting(left.len(), 0);
                self.with_state(|state| {
                    left.into_iter().rev().for_each(|key| state.waiting[kind as usize].push_front(key));
                });
            } else {
                self.give_up(kind, &left);
            }
        }
    }

    /// Counts pieces that are not stored. They may be added again.
    fn give_up(&self, kind: PieceKind, keys: &[PageHash]) {
        if !keys.is_empty() {
            self.store_access.tier().count_unstored(keys.len());
            self.with_state(|state| {
                for key in keys {
                    state.listed[kind as usize].remove(key);
                }
            });
        }
    }

    /// Gives up the pieces that wait, as there is no thread.
    fn give_up_waiting(&self) {
        for kind in PieceKind::ALL {
            let keys = self.with_state(|state| state.take(kind, usize::MAX));
            self.store_access.tier().change_waiting(0, keys.len());
            self.give_up(kind, &keys);
        }
    }

    fn with_state<R>(&self, work: impl FnOnce(&mut WaitingPieces) -> R) -> R {
        let _gate = ForkGate::enter_on_own_thread();
        work(&mut self.state.lock())
    }
}

impl WaitingPieces {
    /// Adds pieces that do not wait and are not being put. Returns how many.
    fn add(&mut self, kind: PieceKind, keys: &[PageHash]) -> usize {
        let (waiting, listed) = (&mut self.waiting[kind as usize], &mut self.listed[kind as usize]);
        let before = waiting.len();
        waiting.extend(keys.iter().filter(|key| listed.insert(**key)));
        waiting.len() - before
    }

    /// Returns the number of pieces that are being put.
    fn being_put(&self, kind: PieceKind) -> usize {
        self.puts.iter().filter(|put| put.kind == kind).map(|put| put.keys.len()).sum()
    }

    /// Takes the first `count` of the pieces that wait.
    fn take(&mut self, kind: PieceKind, count: usize) -> Vec<PageHash> {
        let waiting = &mut self.waiting[kind as usize];
        waiting.drain(..count.min(waiting.len())).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::base::DType;
    use crate::cache::{Namespace, WritePolicy};
    use crate::memory::{Backend, Host};
    use crate::pool::{
        HostTier, HostTierConfig, KvConfig, KvLayout, KvPool, RemoteStore, Store, StoreCallQueue,
    };

    use super::*;

    fn digest(parts: &[&[u8]]) -> PageHash {
        let mut hash = [0; 32];
        hash.iter_mut().zip(parts.concat().iter().rev()).for_each(|(to, from)| *to = *from);
        hash
    }

    /// A tier of two pages, which has these.
    fn tier_of(keys: &[PageHash; 2]) -> Arc<HostTier> {
        let host: Arc<dyn Backend> = Arc::new(Host);
        let config = KvConfig {
            size: 2,
            layer_num: 1,
            k_head_num: 1,
            k_head_dim: 2,
            v_head_num: 1,
            v_head_dim: 2,
            dtype: DType::F32,
            page_size: 1,
            layout: KvLayout::Split,
            pin_memory: false,
        };
        let kv = Arc::new(KvPool::new(&config, &host).expect("small"));
        let config = HostTierConfig {
            size: 2,
            max_states: 0,
            write: WritePolicy::Through,
            pin_memory: false,
            page_lock_threads: 1,
            staging_bytes: 0,
        };
        let tier = Arc::new(HostTier::new(&config, &kv, None, &host).expect("small"));
        let epoch = tier.epoch(PieceKind::Page);
        let incoming = tier.expect(PieceKind::Page, keys, &Namespace::Unnamed, epoch).expect("the epoch");
        drop(incoming.arrive(2));
        tier
    }

    #[test]
    fn puts_of_an_earlier_cache_take_no_room() {
        const LIMIT: Duration = Duration::from_secs(20);
        let (keys, store) = ([[1; 32], [2; 32]], Arc::new(RemoteStore::default()));
        let tier = tier_of(&keys);
        let access = Arc::new(StoreAccess::new(&tier, Arc::clone(&store) as Arc<dyn Store>, "model", digest));
        // The tier has room for one page on its way, and the first queue has it until the end.
        let queues = [0, 1].map(|_| Arc::new(PutQueue::new(&access)));
        let calls: Vec<_> = queues
            .iter()
            .zip(keys)
            .map(|(queue, key)| {
                queue.add(PieceKind::Page, &[key]);
                queue.send();
                store.next(StoreCallQueue::Writes, LIMIT).expect("it is open").expect("it is put")
            })
            .collect();
        drop(calls);
    }
}
