//! The blocks of an engine by their numbers: the number of uses and the hash of each, and the order in which
//! free ones are used again.

use std::ops::Range;
use std::sync::Mutex;

use crate::base::sync::lock;
use crate::base::{BlockId, Id, widen};
use crate::cache::{BlockKey, PolicyKind, SessionId, WaitingId, WaitingRank};
use crate::index::{BadFree, BadFrees};

use super::block_order::{BlockOrder, NewBlock};
use super::{BlockHash, EvictionQueue, QueueEnd};

/// The hash of a block, and what it covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashedTokens {
    /// The hash, with the group of layers.
    pub hash: BlockHash,
    /// The number of tokens of the prompt that the hash covers, if it is known.
    pub tokens: Option<u64>,
}

/// Where blocks with a hash are queued when they are no longer used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashedBlocks {
    /// At the end of the queue, because they may be found again.
    Last,
    /// At the front, like blocks without a hash.
    First,
}

/// What is known of a session when a turn of it is over.
///
/// ```
/// use kvpool::base::{BlockId, Id};
/// use kvpool::cache::{PolicyKind, SessionId};
/// use kvpool::engines::{AfterTurn, BlockTable, HashedBlocks, HashedTokens};
/// let mut table = BlockTable::new(2);
/// table.evict_by(PolicyKind::Adaptive, 16);
/// for (number, after) in [(1, AfterTurn::Pause("user")), (2, AfterTurn::End)] {
///     let session = SessionId::new(number);
///     table.look_up(16, Some(session));
///     let prompt = table.take(1).unwrap();
///     table.set_hash(prompt[0], HashedTokens { hash: [7; 32][..].into(), tokens: None });
///     table.add_prompt(None, &prompt, Some(session));
///     table.end_turn(session, &prompt, after);
///     table.release(&prompt, HashedBlocks::Last);
/// }
/// assert_eq!(table.pop(), Some(BlockId::new(1)), "the second session has ended");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterTurn<'a> {
    /// Nothing.
    Unknown,
    /// It goes on after a pause of this kind, such as a call of a tool.
    Pause(&'a str),
    /// It does not go on.
    End,
}

/// Why blocks were not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// Fewer blocks are free than were requested.
    Short {
        /// The number of blocks in the queue.
        free: usize,
    },
    /// A block in the queue is counted as used.
    InUse {
        /// The block.
        block: BlockId,
        /// The number of uses of the block, which is not 0.
        uses: i64,
    },
}

/// A guard of taken blocks: dropping it gives them back as if they had not been taken.
///
/// ```
/// use std::sync::Mutex;
/// use kvpool::engines::{BlockTable, NotTaken, TakenBlocks};
/// let table = Mutex::new(BlockTable::new(4));
/// let taken: TakenBlocks<'_> = TakenBlocks::take(&table, 3).unwrap();
/// assert_eq!(taken.blocks().len(), 3);
/// let error = TakenBlocks::take(&table, 2).unwrap_err();
/// assert_eq!(error, NotTaken::Short { free: 1 });
/// drop(taken);
/// TakenBlocks::take(&table, 4).unwrap().keep();
/// assert_eq!(table.lock().unwrap().queue().len(), 0);
/// ```
#[derive(Debug)]
#[must_use]
pub struct TakenBlocks<'a> {
    table: &'a Mutex<BlockTable>,
    blocks: Vec<BlockId>,
}

impl<'a> TakenBlocks<'a> {
    /// Takes the first free blocks of a table, as [`BlockTable::take`] does.
    ///
    /// # Errors
    /// See [`BlockTable::take`].
    pub fn take(table: &'a Mutex<BlockTable>, count: usize) -> Result<Self, NotTaken> {
        Ok(Self { table, blocks: lock(table).take(count)? })
    }

    /// Returns the blocks.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Ends the guard: the blocks stay taken.
    pub fn keep(mut self) {
        self.blocks.clear();
    }
}

impl Drop for TakenBlocks<'_> {
    fn drop(&mut self) {
        if !self.blocks.is_empty() {
            lock(self.table).undo_take(&self.blocks);
        }
    }
}

/// The number of uses and the hash of each block, and the queue of free blocks.
///
/// An engine may set counts and change the queue itself. Calls refuse blocks whose count and place in the
/// queue contradict each other.
///
/// Free blocks are taken from the front of the queue. With [`BlockTable::evict_by`], those with a hash that
/// [`BlockTable::add_prompt`] has named are taken in the order of a policy instead, when one of them or of the
/// others with a hash is in front.
///
/// ```
/// use kvpool::base::{BlockId, Id};
/// use kvpool::engines::{BlockTable, HashedBlocks, HashedTokens};
/// let [a, b, c, d] = [0, 1, 2, 3].map(BlockId::new);
/// let mut table = BlockTable::new(4);
/// assert_eq!(table.take(2).unwrap(), [a, b]);
/// table.set_hash(a, HashedTokens { hash: b"hash"[..].into(), tokens: Some(16) });
/// assert_eq!(table.release(&[a, b], HashedBlocks::Last).dropped(), 0);
/// assert_eq!(table.queue().iter().collect::<Vec<_>>(), [b, c, d, a]);
/// table.retain(&[a]).unwrap();
/// assert_eq!((table.uses(a), table.queue().len()), (1, 3));
///
/// use kvpool::cache::PolicyKind;
/// let mut table = BlockTable::new(2);
/// table.evict_by(PolicyKind::Adaptive, 16);
/// table.look_up(32, None);
/// let prompt = table.take(2).unwrap();
/// for (&block, hash) in prompt.iter().zip([b"1", b"2"]) {
///     table.set_hash(block, HashedTokens { hash: hash[..].into(), tokens: None });
/// }
/// table.add_prompt(None, &prompt, None);
/// table.release(&prompt, HashedBlocks::Last);
/// assert_eq!(table.pop(), Some(b), "the first block is of use without the second");
/// ```
#[derive(Debug)]
pub struct BlockTable {
    queue: EvictionQueue,
    blocks: Vec<BlockState>,
    order: Option<BlockOrder>,
}

#[derive(Clone, Debug, Default)]
struct BlockState {
    uses: i64,
    is_null: bool,
    hashed: Option<HashedTokens>,
}

impl BlockTable {
    /// Creates a table of `count` blocks, all of them free, the lowest at the front.
    #[must_use]
    pub fn new(count: u32) -> Self {
        let blocks = vec![BlockState::default(); widen(count)];
        Self { queue: EvictionQueue::full(count), blocks, order: None }
    }

    /// Takes blocks with a hash by a policy from now on. A block has `tokens` tokens, 1 to 2^20.
    pub fn evict_by(&mut self, policy: PolicyKind, tokens: u32) {
        self.order = Some(BlockOrder::new(policy, self.blocks.len(), tokens));
    }

    /// Records that a prompt of `tokens` tokens was looked up: the time of the policy. With a session, a turn of it
    /// begins. The request counts with what [`BlockTable::set_user`] has said is missing, so it comes before that is reset.
    pub fn look_up(&mut self, tokens: u64, session: Option<SessionId>) {
        if let Some(order) = &mut self.order {
            order.look_up(tokens, session);
        }
    }

    /// Sets the session of the request that uses blocks from now on, by [`BlockTable::retain`] and
    /// [`BlockTable::remove_free`], and adds some, by [`BlockTable::add_prompt`]; of none at first. `missing` are the
    /// positions of its prompt that were not found: how many that are, compared to other requests, tells something of
    /// whether it will be continued. Without any, blocks that are added are as those before them.
    pub const fn set_user(&mut self, session: Option<SessionId>, missing: Range<u32>) {
        if let Some(order) = &mut self.order {
            order.set_user(session, missing);
        }
    }

    /// Tells the policy that `blocks` follow each other in a prompt, of a session or of none, and the block `before`,
    /// if there is one. Blocks without a hash, and what is behind them, are left out.
    pub fn add_prompt(&mut self, before: Option<BlockId>, blocks: &[BlockId], session: Option<SessionId>) {
        let Some(order) = &mut self.order else { return };
        let new = |&block: &BlockId| {
            let state = &self.blocks[widen(block.number())];
            let hashed = state.hashed.as_ref().filter(|_| !state.is_null)?;
            Some(NewBlock { block, key: key_of(&hashed.hash) })
        };
        let new: Vec<NewBlock> = blocks.iter().map_while(new).collect();
        order.add(before, &new, session, &self.queue);
    }

    /// Records that a turn of a session is over, which had these blocks and has not released them, and what follows.
    /// Blocks that only this session has used are taken first if the turn has left them, or if none follows. Without
    /// blocks the session is only told what follows.
    pub fn end_turn(&mut self, session: SessionId, blocks: &[BlockId], after: AfterTurn<'_>) {
        let Some(order) = &mut self.order else { return };
        order.end_turn(session, blocks, &self.queue);
        match after {
            AfterTurn::Unknown => {}
            AfterTurn::Pause(kind) => order.pause(session, kind, &self.queue),
            AfterTurn::End => order.end(session, &self.queue),
        }
    }

    /// Adds a request to the engine's waiting queue, at an end of those of its rank, for which these blocks were found.
    /// They are taken after all others with a hash, those of the request at the back first, until the request is removed.
    /// A block that several waiting requests need counts as of the first of them in the queue.
    ///
    /// ```
    /// use kvpool::cache::{PolicyKind, WaitingId, WaitingRank};
    /// use kvpool::engines::{BlockTable, HashedBlocks, HashedTokens, QueueEnd};
    /// let mut table = BlockTable::new(3);
    /// table.evict_by(PolicyKind::Adaptive, 16);
    /// let prompts = [b"a", b"b"].map(|hash| {
    ///     table.look_up(16, None);
    ///     let prompt = table.take(1).unwrap();
    ///     table.set_hash(prompt[0], HashedTokens { hash: hash[..].into(), tokens: None });
    ///     table.add_prompt(None, &prompt, None);
    ///     table.release(&prompt, HashedBlocks::Last);
    ///     prompt
    /// });
    /// let request: WaitingId = table.add_waiting(&[], WaitingRank::default(), QueueEnd::Back);
    /// table.extend_waiting(request, &prompts[0]);
    /// assert_eq!(table.take(2).unwrap()[1], prompts[1][0], "a waiting request needs the older prompt");
    /// table.remove_waiting(request);
    /// assert_eq!(table.take(1).unwrap(), prompts[0]);
    /// ```
    pub fn add_waiting(&mut self, blocks: &[BlockId], rank: WaitingRank, end: QueueEnd) -> WaitingId {
        let Self { order, queue, .. } = self;
        let add = |order: &mut BlockOrder| order.add_waiting(blocks, rank, end, queue);
        order.as_mut().map_or(WaitingId::new(rank, 0), add)
    }

    /// Records that these blocks were found, too, for a request that is in the waiting queue: others have computed them.
    pub fn extend_waiting(&mut self, request: WaitingId, blocks: &[BlockId]) {
        if let Some(order) = &mut self.order {
            order.extend_waiting(request, blocks, &self.queue);
        }
    }

    /// Removes a request from the waiting queue, because it runs now or does not go on.
    pub fn remove_waiting(&mut self, request: WaitingId) {
        if let Some(order) = &mut self.order {
            order.remove_waiting(request, &self.queue);
        }
    }

    /// Returns the queue of free blocks.
    #[must_use]
    pub const fn queue(&self) -> &EvictionQueue {
        &self.queue
    }

    /// Takes the free block that is next, whatever the number of its uses.
    pub fn pop(&mut self) -> Option<BlockId> {
        let front = self.queue.front()?;
        let Some(order) = &mut self.order else { return self.queue.pop_front() };
        let next = if order.knows(front) { order.victim().unwrap_or(front) } else { front };
        self.queue.remove(next);
        order.forget_taken(next, &self.queue);
        Some(next)
    }

    /// Removes a block from the queue because it is used again. Returns whether it was free.
    pub fn remove_free(&mut self, block: BlockId) -> bool {
        let was = self.queue.remove(block);
        if was && let Some(order) = &mut self.order {
            order.record_use(block);
        }
        was
    }

    /// Adds blocks at an end of the queue one after the other, either all of them or none.
    ///
    /// # Errors
    /// See [`EvictionQueue::push_all`].
    pub fn push_free(&mut self, blocks: &[BlockId], end: QueueEnd) -> Result<(), BlockId> {
        self.queue.push_all(blocks, end)?;
        if let Some(order) = &mut self.order {
            for &block in blocks {
                order.offer(block, &self.queue);
            }
        }
        Ok(())
    }

    /// Returns the number of uses of a block.
    #[must_use]
    pub fn uses(&self, block: BlockId) -> i64 {
        self.state(block).uses
    }

    /// Sets the number of uses of a block, for an engine that counts itself.
    pub fn set_uses(&mut self, block: BlockId, uses: i64) {
        self.state_mut(block).uses = uses;
    }

    /// Returns whether a block is a null block, which stands for no memory.
    #[must_use]
    pub fn is_null(&self, block: BlockId) -> bool {
        self.state(block).is_null
    }

    /// Makes a block a null block, or an ordinary one again.
    pub fn set_null(&mut self, block: BlockId, is_null: bool) {
        self.state_mut(block).is_null = is_null;
    }

    /// Returns the hash of a block.
    #[must_use]
    pub fn hashed(&self, block: BlockId) -> Option<&HashedTokens> {
        self.state(block).hashed.as_ref()
    }

    /// Sets the hash of a block, unless it has one. Returns whether it had none.
    pub fn set_hash(&mut self, block: BlockId, hashed: HashedTokens) -> bool {
        let place = &mut self.state_mut(block).hashed;
        let is_new = place.is_none();
        place.get_or_insert(hashed);
        is_new
    }

    /// Removes the hash of a block, and returns it.
    pub fn take_hash(&mut self, block: BlockId) -> Option<HashedTokens> {
        if let Some(order) = &mut self.order {
            order.forget(block, &self.queue);
        }
        self.state_mut(block).hashed.take()
    }

    /// Takes the next `count` free blocks. Each has one use then.
    ///
    /// # Errors
    /// [`NotTaken`] says why no block was taken.
    pub fn take(&mut self, count: usize) -> Result<Vec<BlockId>, NotTaken> {
        let free = self.queue.len();
        if count > free {
            return Err(NotTaken::Short { free });
        }
        let taken: Vec<BlockId> = (0..count).map_while(|_| self.pop()).collect();
        if let Some(&block) = taken.iter().find(|&&block| self.uses(block) != 0) {
            self.put_back(&taken);
            return Err(NotTaken::InUse { block, uses: self.uses(block) });
        }
        for &block in &taken {
            self.set_uses(block, 1);
        }
        Ok(taken)
    }

    /// Gives back the blocks that [`BlockTable::take`] returned.
    fn undo_take(&mut self, taken: &[BlockId]) {
        for &block in taken {
            self.set_uses(block, 0);
        }
        self.put_back(taken);
    }

    /// Makes blocks free that were taken: they are the next ones, in the same order.
    fn put_back(&mut self, taken: &[BlockId]) {
        for &block in taken.iter().rev() {
            self.queue.push_front(block);
        }
    }

    /// Removes one use of each block, except null blocks. Blocks that are no longer used become free, in the
    /// given order. Blocks without a use are dropped and reported.
    pub fn release(&mut self, blocks: &[BlockId], hashed: HashedBlocks) -> BadFrees {
        let (mut first, mut bad) = (Vec::new(), BadFrees::default());
        for &block in blocks {
            let state = &mut self.blocks[widen(block.number())];
            if state.is_null {
                continue;
            }
            if state.uses <= 0 {
                bad.add(i64::from(block.number()), BadFree::AlreadyFree, 1);
                continue;
            }
            state.uses -= 1;
            if state.uses > 0 {
                continue;
            }
            if hashed == HashedBlocks::Last && state.hashed.is_some() {
                self.queue.push_back(block);
                if let Some(order) = &mut self.order {
                    order.offer(block, &self.queue);
                }
            } else {
                first.push(block);
            }
        }
        for &block in first.iter().rev() {
            self.queue.push_front(block);
            if let Some(order) = &mut self.order {
                order.offer(block, &self.queue);
            }
        }
        bad
    }

    /// Adds one use of each block, except null blocks, and removes the free ones from the queue.
    ///
    /// # Errors
    /// The first block that is neither used nor free. Nothing is changed then.
    pub fn retain(&mut self, blocks: &[BlockId]) -> Result<(), BlockId> {
        let is_lost =
            |&&block: &&BlockId| !self.is_null(block) && self.uses(block) <= 0 && !self.queue.contains(block);
        if let Some(&block) = blocks.iter().find(is_lost) {
            return Err(block);
        }
        for &block in blocks {
            let state = &mut self.blocks[widen(block.number())];
            if state.is_null {
                continue;
            }
            if let Some(order) = &mut self.order {
                order.record_use(block);
            }
            if state.uses <= 0 {
                state.uses = 0;
                self.queue.remove(block);
            }
            state.uses += 1;
        }
        Ok(())
    }

    fn state(&self, block: BlockId) -> &BlockState {
        &self.blocks[widen(block.number())]
    }

    fn state_mut(&mut self, block: BlockId) -> &mut BlockState {
        &mut self.blocks[widen(block.number())]
    }
}

/// Returns a key for a hash, all bits of which are well mixed.
fn key_of(hash: &BlockHash) -> BlockKey {
    let mut first = [0; 8];
    let bytes = hash.as_bytes();
    let len = bytes.len().min(first.len());
    first[..len].copy_from_slice(&bytes[..len]);
    BlockKey::new(u64::from_le_bytes(first))
}
