//! Numbers of namespaces, which nodes store instead of names.

use std::collections::HashMap;

use crate::cache::Namespace;

/// The number of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct NamespaceId(u32);

impl NamespaceId {
    /// The number of [`Namespace::Unnamed`].
    pub(super) const UNNAMED: Self = Self(0);

    pub(super) const fn number(self) -> u32 {
        self.0
    }
}

/// The namespaces of a tree. The unnamed namespace always has its number, and is not listed.
///
/// *Invariant.* Between calls, the listed namespaces are those of the children of the root. Within a call, an
/// insertion numbers its namespace before it adds the first node.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    /// The inverse of `by_number`.
    numbers: HashMap<Namespace, NamespaceId>,
    by_number: HashMap<NamespaceId, NumberedNamespace>,
    /// The last number that was given, so that no number is given twice.
    last: u32,
}

/// A namespace that has a number.
#[derive(Debug)]
struct NumberedNamespace {
    name: Namespace,
    /// The number of children of the root in this namespace.
    children: usize,
}

impl Namespaces {
    /// Returns the number of a namespace, if it has one.
    pub(super) fn number(&self, name: &Namespace) -> Option<NamespaceId> {
        // The most frequent namespace needs no look-up.
        if *name == Namespace::Unnamed { Some(NamespaceId::UNNAMED) } else { self.numbers.get(name).copied() }
    }

    pub(super) fn number_or_new(&mut self, name: &Namespace) -> NamespaceId {
        if let Some(number) = self.number(name) {
            return number;
        }
        self.last += 1;
        let number = NamespaceId(self.last);
        self.numbers.insert(name.clone(), number);
        self.by_number.insert(number, NumberedNamespace { name: name.clone(), children: 0 });
        number
    }

    pub(super) fn name(&self, number: NamespaceId) -> Namespace {
        self.by_number.get(&number).map_or(Namespace::Unnamed, |numbered| numbered.name.clone())
    }

    /// Counts a new child of the root.
    pub(super) fn add_child(&mut self, number: NamespaceId) {
        if let Some(numbered) = self.by_number.get_mut(&number) {
            numbered.children += 1;
        }
    }

    /// Undoes [`Namespaces::add_child`]. The number is dropped with the last child.
    pub(super) fn remove_child(&mut self, number: NamespaceId) {
        if let Some(numbered) = self.by_number.get_mut(&number) {
            numbered.children -= 1;
            self.forget_unused(number);
        }
    }

    /// Drops a number that no node has.
    pub(super) fn forget_unused(&mut self, number: NamespaceId) {
        if self.by_number.get(&number).is_some_and(|numbered| numbered.children == 0)
            && let Some(NumberedNamespace { name, .. }) = self.by_number.remove(&number)
        {
            self.numbers.remove(&name);
        }
    }

    /// Drops all numbers. Later numbers differ from them.
    pub(super) fn clear(&mut self) {
        self.numbers.clear();
        self.by_number.clear();
    }

    /// Returns the numbers of the namespaces, each with its number of children of the root.
    pub(super) fn counts(&self) -> impl Iterator<Item = (NamespaceId, usize)> + '_ {
        self.by_number.iter().map(|(&number, numbered)| (number, numbered.children))
    }

    pub(super) fn bytes(&self) -> usize {
        let names = self.by_number.values().map(|numbered| 2 * numbered.name.text_bytes());
        self.numbers.capacity() * size_of::<(Namespace, NamespaceId)>()
            + self.by_number.capacity() * size_of::<(NamespaceId, NumberedNamespace)>()
            + names.sum::<usize>()
    }
}
