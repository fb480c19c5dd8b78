// UndefinedBehaviorSanitizer must report this: a shift by more bits than there are.
int main(int argc, char**) {
  const int shifted = argc << (31 + argc);
  return shifted == 12345;
}
