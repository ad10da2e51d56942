//! What came and went, as events that another process can index: a router that sends a prompt to the machine
//! that has most of it.
//!
//! A page is named by a key over everything up to its end, so that the same prefix has the same key in every
//! process. A key is made once, when its page is published.

use std::collections::{HashMap, VecDeque};

use crate::base::Page;

use super::Namespace;

/// The key of a page: a hash of its tokens and of the key before it, which begins with the namespace and the
/// page size.
pub type PageHash = [u8; 32];

/// A hash of the concatenation of parts: BLAKE3, as far as keys shall be those of other processes.
pub type Digest = fn(&[&[u8]]) -> PageHash;

/// A change of what is cached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Pages that follow each other were stored.
    Stored {
        /// Their keys.
        pages: Vec<PageHash>,
        /// The key of the page before them, if there is one.
        parent: Option<PageHash>,
        /// Their tokens.
        tokens: Vec<i32>,
        /// Their namespace.
        namespace: Namespace,
    },
    /// Pages were removed.
    Removed {
        /// Their keys.
        pages: Vec<PageHash>,
    },
    /// Nothing is cached any more, or events were lost: what follows is not all that is cached.
    Cleared,
}

/// The events that were not taken yet, and the keys of the pages that can be found.
#[derive(Debug)]
pub(super) struct Journal {
    digest: Digest,
    keys: HashMap<Page, PageHash>,
    events: VecDeque<Event>,
    /// The sizes of the events together.
    tokens: usize,
}

impl Event {
    /// Its tokens or, if there are more, its keys.
    fn size(&self) -> usize {
        match self {
            Self::Stored { pages, tokens, .. } => pages.len().max(tokens.len()),
            Self::Removed { pages } => pages.len(),
            Self::Cleared => 0,
        }
    }
}

/// Events that are kept for a reader. One that is later begins anew.
const MOST_EVENTS: usize = 1 << 16;

/// Tokens of these events, some 100 MB with their keys in pages of one token.
const MOST_TOKENS: usize = 1 << 21;

impl Journal {
    pub(super) fn new(digest: Digest) -> Self {
        Self { digest, keys: HashMap::new(), events: VecDeque::new(), tokens: 0 }
    }

    /// Takes note of `pages` for `tokens`, which follow `parent`.
    pub(super) fn stored(
        &mut self,
        namespace: &Namespace,
        parent: Option<Page>,
        tokens: &[i32],
        pages: &[Page],
    ) {
        let page_size = tokens.len() / pages.len();
        let parent = parent.and_then(|page| self.keys.get(&page).copied());
        let mut before = parent.unwrap_or_else(|| self.root(namespace, page_size));
        let mut keys = Vec::with_capacity(pages.len());
        let mut bytes = Vec::with_capacity(page_size * size_of::<i32>());
        for (tokens, &page) in tokens.chunks(page_size).zip(pages) {
            bytes.clear();
            bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
            before = (self.digest)(&[&before, &bytes]);
            self.keys.insert(page, before);
            keys.push(before);
        }
        let (tokens, namespace) = (tokens.to_vec(), namespace.clone());
        self.push(Event::Stored { pages: keys, parent, tokens, namespace });
    }

    /// The key before the first page.
    fn root(&self, namespace: &Namespace, page_size: usize) -> PageHash {
        let (kind, name) = match namespace {
            Namespace::Unnamed => (0, Vec::new()),
            Namespace::Number(number) => (1, number.to_string().into_bytes()),
            Namespace::Large(digits) => (1, digits.clone().into_bytes()),
            Namespace::Text(text) => (2, text.clone().into_bytes()),
            Namespace::Bytes(bytes) => (3, bytes.clone()),
        };
        (self.digest)(&[&(page_size as u64).to_le_bytes(), &[kind], &name])
    }

    /// Takes note that pages are found no more. Those of which that is known already are left out.
    pub(super) fn removed(&mut self, pages: &[Page]) {
        let keys: Vec<_> = pages.iter().filter_map(|page| self.keys.remove(page)).collect();
        match self.events.back_mut() {
            _ if keys.is_empty() => (),
            Some(Event::Removed { pages }) => pages.extend(keys),
            _ => self.push(Event::Removed { pages: keys }),
        }
    }

    /// Takes note that nothing is found any more.
    pub(super) fn cleared(&mut self) {
        self.keys.clear();
        self.events.clear();
        self.push(Event::Cleared);
    }

    fn push(&mut self, event: Event) {
        let tokens = event.size();
        if self.events.len() == MOST_EVENTS || self.tokens + tokens > MOST_TOKENS && !self.events.is_empty() {
            self.events.clear();
            self.events.push_back(Event::Cleared);
            self.tokens = 0;
        }
        self.tokens += tokens;
        self.events.push_back(event);
    }

    pub(super) fn bytes(&self) -> usize {
        self.keys.capacity() * (size_of::<(Page, PageHash)>() + 1)
            + self.events.capacity() * size_of::<Event>()
            + self.tokens * (size_of::<i32>() + size_of::<PageHash>())
    }

    pub(super) fn take(&mut self) -> Vec<Event> {
        self.tokens = 0;
        std::mem::take(&mut self.events).into()
    }
}
